"""BalancedDataParallel: who gets how many samples, what may be fed in, and that the module stays the user's own."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from splittune.errors import ConfigError, DeviceError, InvalidSplitError
from splittune.parallel import BalancedDataParallel
from splittune.split import even_shards
from tests.parallel.models import Call, ThreadedLink, mlp, vectors


def spread(model: BalancedDataParallel, num_samples: int) -> tuple[int, ...]:
    """How many samples each device is given, by what its replica is called with."""
    seen: dict[int, int] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        samples = inputs[0]
        seen[int(samples[0])] = len(samples)

    hook = model.unwrap().register_forward_pre_hook(note)
    model(torch.arange(num_samples))
    hook.remove()
    starts = sorted(seen)
    assert [*starts, num_samples] == [0, *(start + seen[start] for start in starts)], "every sample once, in order"
    return tuple(seen[start] for start in starts)


def identity(num_devices: int, gpu0_bsz: int | None = None, **options: Any) -> BalancedDataParallel:
    module = Call(lambda module, x: x * module.scale)
    return BalancedDataParallel(gpu0_bsz, module, ["cpu"] * num_devices, **options)


def call(function: Callable[..., Any], *shard_sizes: int, dim: int = 0) -> BalancedDataParallel:
    return BalancedDataParallel(
        module=Call(lambda module, *args, **kwargs: function(*args, **kwargs)),
        device_ids=["cpu"] * len(shard_sizes),
        shard_sizes=shard_sizes,
        dim=dim,
    )


# shares


@pytest.mark.parametrize(
    ("batch_size", "num_devices", "gpu0_bsz", "shards"),
    [
        # where the published wrapper falls back to an even scatter and GPU 0 gets more than it was given
        (13, 4, 3, (3, 4, 3, 3)),
        (14, 4, 3, (3, 4, 4, 3)),
        # transformer-xl's own settings
        (224, 4, 32, (32, 64, 64, 64)),
        (224, 8, 32, (32, 28, 28, 28, 27, 27, 27, 27)),
        (22, 4, 4, (4, 6, 6, 6)),
        (22, 8, 4, (4, 3, 3, 3, 3, 2, 2, 2)),
        (60, 4, 4, (4, 19, 19, 18)),
        (64, 4, 0, (22, 21, 21)),
        (512, 4, 0, (171, 171, 170)),
        # where it divides by zero, breaks, or cannot do it at all
        (8, 1, 8, (8,)),
        (3, 4, 2, (2, 1)),
        (1, 3, 1, (1,)),
        (2, 4, 0, (1, 1)),
        (10, 3, 8, (8, 1, 1)),
        (5, 2, 5, (5,)),
    ],
)
def test_gpu0_takes_exactly_its_share(batch_size: int, num_devices: int, gpu0_bsz: int, shards: tuple[int]) -> None:
    """GPU 0 takes what it was given, less, as much or more than the others, who share the rest evenly."""
    assert spread(identity(num_devices, gpu0_bsz), batch_size) == shards


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode"])
def test_nothing_is_printed(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In no mode does a call write anything to the terminal."""
    model = identity(4, 4).train(mode == "train")
    grad = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    with grad():
        assert model(torch.arange(22)).tolist() == list(range(22))
    assert capsys.readouterr() == ("", "")


@given(data=st.data(), num_devices=st.integers(2, 5), largest=st.integers(1, 20))
def test_nobody_exceeds_the_share_they_trained_with(data: st.DataObject, num_devices: int, largest: int) -> None:
    """After the largest micro-batch, shorter ones shrink every share: in training, under eval and without gradients."""
    model = identity(num_devices, data.draw(st.integers(0, largest)))
    shares = model._shards_of(largest)
    model(torch.arange(largest))
    for training in (True, False):
        fitted = model.train(training)._shards_of(data.draw(st.integers(0, largest)))
        assert all(shard <= share for shard, share in zip(fitted, shares, strict=True))
    assert model._shards_of(largest) == shares


def test_an_evaluation_leaves_no_trace_in_the_shares() -> None:
    """A larger batch under eval() or no_grad() does not count as trained on."""
    model = identity(2, 2)
    model(torch.arange(6))
    with torch.no_grad():
        assert spread(model, 40) == (2, 38)
    assert spread(model.eval(), 40) == (2, 38)
    assert spread(model.train(), 3) == (1, 2)


def test_a_call_that_failed_leaves_no_trace_in_the_shares() -> None:
    """A batch that ran out of memory was not trained on: the next one is not measured by it."""
    model = identity(2, 4)
    model.module.function = lambda module, x: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.arange(64))
    model.module.function = lambda module, x: x * module.scale
    assert spread(model, 16) == (4, 12)


def test_a_batch_of_one_is_evaluated() -> None:
    """Under eval() a batch below GPU 0's share is no error: it is shared evenly, away from GPU 0."""
    model = identity(4, 4).eval()
    assert model._shards_of(1) == even_shards(1, 4) == (0, 1, 0, 0)
    assert model(torch.tensor([7])).tolist() == [7]


@pytest.mark.parametrize(
    ("gpu0_bsz", "num_devices", "message"),
    [
        (3500, 4, "gpu0_bsz=3500 exceeds the first micro-batch, of 100 samples, by 3400. Use gpu0_bsz <= 100"),
        (40, 1, "gpu0_bsz=40 of a micro-batch of 100 leaves 60 samples"),
    ],
)
def test_a_share_that_cannot_be_honoured_is_refused(gpu0_bsz: int, num_devices: int, message: str) -> None:
    """Nothing falls back in silence: the arithmetic that fails is in the message."""
    with pytest.raises(InvalidSplitError, match=re.escape(message)):
        identity(num_devices, gpu0_bsz)(torch.arange(100))


def test_a_micro_batch_above_the_tuned_shards_is_refused() -> None:
    """With every device's share given, a larger micro-batch is somebody's excess."""
    with pytest.raises(InvalidSplitError, match=re.escape("8 samples does not fit the tuned shards 1 + 2 + 4 = 7")):
        identity(3, shard_sizes=(1, 2, 4))(torch.arange(8))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, InvalidSplitError, "expected one of them"),
        ({"gpu0_bsz": 1, "shard_sizes": (1, 2)}, InvalidSplitError, "expected one of them"),
        ({"gpu0_bsz": -1}, InvalidSplitError, "gpu0_bsz is -1"),
        ({"gpu0_bsz": True}, InvalidSplitError, "gpu0_bsz is True"),
        ({"gpu0_bsz": 1.5}, InvalidSplitError, "gpu0_bsz is 1.5"),
        ({"gpu0_bsz": 0, "device_ids": ["cpu"]}, InvalidSplitError, "leaves the whole batch to nobody"),
        ({"shard_sizes": (1, 2, 3)}, InvalidSplitError, "has 3 shares for 2 devices"),
        ({"shard_sizes": (0, 0)}, InvalidSplitError, "not all 0"),
        ({"shard_sizes": (1, -1)}, InvalidSplitError, "expected integers of at least 0"),
        ({"gpu0_bsz": 1, "device_ids": []}, DeviceError, "device_ids is empty"),
        ({"gpu0_bsz": 1, "module": None}, TypeError, "BalancedDataParallel(gpu0_bsz, module)"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """What is wrong, and what was expected, is said when the wrapper is made."""
    with pytest.raises(error, match=re.escape(message)):
        BalancedDataParallel(**{"module": nn.Linear(1, 1), "device_ids": ["cpu", "cpu"]} | options)


def test_numpys_integers_are_integers() -> None:
    """Shares out of an array are taken, as plain integers."""
    for options in ({"gpu0_bsz": np.int64(1)}, {"shard_sizes": np.array([1, 2])}):
        wrapped = BalancedDataParallel(module=nn.Linear(1, 1), device_ids=["cpu", "cpu"], **options)
        assert wrapped(torch.ones(3, 1)).shape == (3, 1)
        assert {type(size) for size in (wrapped.gpu0_bsz, *(wrapped.shard_sizes or ()))} <= {int, type(None)}


def test_a_module_elsewhere_is_refused_by_name() -> None:
    """A parameter that is not on the first device is named, with what to do."""
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    model = BalancedDataParallel(module=module, shard_sizes=(1, 1), device_ids=["cpu", "cpu:0"])
    with pytest.raises(ConfigError, match=re.escape("1.weight of the module is on meta: expected cpu")):
        model(torch.zeros(2, 1))


def test_the_cpu_may_be_counted() -> None:
    """``cpu:0`` is the CPU, where tensors say they are on ``cpu``."""
    model = BalancedDataParallel(module=nn.Linear(1, 2), shard_sizes=(1, 1), device_ids=["cpu:0", "cpu"])
    assert model(torch.zeros(2, 1)).shape == (2, 2)


# inputs


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Batch:
    x: Tensor
    names: list[str]


@pytest.mark.parametrize("shards", [(2, 1), (0, 3), (3, 0), (1, 1, 1), (0, 1, 0, 2)])
@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (lambda x, y: x + y, (torch.ones(3), torch.arange(3)), {}),
        (lambda *, x: x * 2, (), {"x": torch.arange(3)}),
        (lambda x, factor: x * factor, (torch.arange(3),), {"factor": 2}),
        (
            lambda batch: batch["a"][0] + batch["b"].left,
            ({"a": [torch.ones(3)], "b": Pair(torch.arange(3), None)},),
            {},
        ),
        (lambda batch: batch.x * 2, (Batch(torch.arange(3), ["a", "b", "c"]),), {}),
        (lambda mode, x=None: x * len(mode), ("mode",), {"x": torch.arange(3)}),
        (lambda x, scale: x * scale, (torch.arange(3), torch.tensor(2.0)), {}),
        (lambda x, mask=None: x if mask is None else x * mask, (torch.arange(3), None), {}),
        (lambda x: OrderedDict(x)["x"], (OrderedDict(x=torch.arange(3)),), {}),
        (lambda x: x * 2, (torch.ones(3, 0),), {}),
    ],
    ids=range(10),
)
def test_whatever_nn_data_parallel_takes(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shards: tuple[int, ...]
) -> None:
    """Nested inputs, keywords alone, and what is no tensor reach every replica as they reach one device."""
    assert torch.equal(call(function, *shards)(*args, **kwargs), function(*args, **kwargs))


def test_plain_arguments_are_no_samples() -> None:
    """Two numbers beside a batch of two are arguments, and a tuple of numbers is a size: neither is cut."""

    def forward(height: int, width: int, size: tuple[int, int], *, x: Tensor) -> Tensor:
        return x.view(-1, height, width) * size[0] * size[1]

    got = call(forward, 1, 1)(2, 3, (4, 5), x=torch.ones(2, 6))
    assert torch.equal(got, torch.full((2, 2, 3), 20.0))


def test_texts_go_with_their_samples() -> None:
    """A list with a string for every sample is cut as the tensors are."""
    model = call(lambda x, texts: x * torch.tensor([len(text) for text in texts]), 1, 2)
    assert model(torch.ones(3), texts=["a", "bb", "ccc"]).tolist() == [1, 2, 3]


def test_sizes_that_differ_name_the_argument() -> None:
    """Inputs of different lengths are refused under the names they were passed by."""
    with pytest.raises(ConfigError, match=re.escape(".inputs[0] has 4, .kwargs['mask'] has 3")):
        call(lambda x, mask: x, 2, 2)(torch.zeros(4), mask=torch.zeros(3))


@pytest.mark.parametrize("num_devices", [1, 3])
def test_without_tensors_the_module_runs_once(num_devices: int) -> None:
    """A call without inputs, or with plain ones only, is one call on the first device, gradients included."""
    module = Call(lambda module, *args, **kwargs: module.scale * 3)
    model = BalancedDataParallel(4 if num_devices == 1 else 0, module, ["cpu"] * num_devices)
    model().backward()
    model("text", [1, 2], flag=True).backward()
    assert module.scale.grad == 6


@pytest.mark.parametrize("options", [{"gpu0_bsz": 2}, {"gpu0_bsz": 0}, {"shard_sizes": (0, 2, 2)}])
def test_an_empty_batch_runs_on_the_first_device(options: dict[str, Any]) -> None:
    """No samples are no error: the output is empty, in shape and dtype as with samples."""
    model = BalancedDataParallel(module=nn.Linear(3, 2), device_ids=["cpu"] * 3, **options)
    assert model(torch.zeros(0, 3)).shape == (0, 2)


@pytest.mark.parametrize("dim", [1, -1])
def test_samples_may_be_counted_along_another_dimension(dim: int) -> None:
    """With dim=1, as recurrent models have it, inputs are cut and outputs joined there."""
    sequence = torch.arange(12.0).view(3, 4)
    assert torch.equal(call(lambda x: x * 2, 1, 0, 3, dim=dim)(sequence), sequence * 2)


# the user's module


def test_the_module_stays_the_users_own() -> None:
    """unwrap() is the very object, its parameters are the wrapper's, and train() and eval() reach every replica."""
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2))
    model = BalancedDataParallel(2, module, ["cpu"] * 3)
    assert model.unwrap() is module
    assert [*model.parameters()] == [*module.parameters()]
    x = vectors(7)
    assert torch.equal(model.eval()(x), module(x))
    modes: list[bool] = []
    module[1].register_forward_hook(lambda replica, inputs, output: modes.append(replica.training))
    model(x)
    model.train()(x)
    assert modes == [False] * 3 + [True] * 3


def test_repr_says_how_it_splits() -> None:
    """A printed model shows the shares and the devices."""
    assert "gpu0_bsz=2, devices=['cpu', 'cpu']" in repr(identity(2, 2))
    assert "shard_sizes=(1, 2), devices=['cpu', 'cpu']" in repr(identity(2, shard_sizes=[1, 2]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_on_its_own(copied: Callable[[Any], Any]) -> None:
    """deepcopy and pickle give a wrapper of its own module, with the same shares, also after it was used."""
    model = BalancedDataParallel(1, mlp(), ["cpu"] * 3)
    x = vectors(7)
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    twin = copied(model)
    assert torch.equal(twin(x), model(x))
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert twin._shards_of(4) == model._shards_of(4)


def test_to_output_moves_whatever_is_nested() -> None:
    """Targets are sent to where outputs are; on one device they are the same tensors."""
    targets = {"a": torch.zeros(2), "b": [torch.ones(1), "text"]}
    moved = identity(2, 1).to_output(targets)
    assert moved["a"] is targets["a"]
    assert moved["b"][1] == "text"
    link = ThreadedLink(1)
    assert BalancedDataParallel(1, mlp(), ["cpu"], link=link).to_output(targets)["a"] is targets["a"]
