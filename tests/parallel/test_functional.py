"""data_parallel(): one call on several devices, as the module gives it on one."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import splittune
from splittune.errors import ConfigError, InvalidSplitError
from splittune.parallel import data_parallel
from tests.parallel.models import Call, ThreadedLink, assert_same, gradients, loss_of, mlp, vectors, whole_batch


def model() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def sizes_of(*, num_samples: int, num_devices: int, **shares: Any) -> list[int]:
    """How many samples each replica was called with."""
    sizes: list[int] = []
    module = Call(lambda module, x: sizes.append(len(x)) or x * module.scale)
    data_parallel(module, torch.ones(num_samples), ["cpu"] * num_devices, **shares)
    return sizes


def test_it_stands_at_the_top() -> None:
    """``splittune.data_parallel`` beside torch's."""
    assert splittune.data_parallel is data_parallel


@given(shards=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), data=st.data())
def test_outputs_and_gradients_are_one_devices(shards: list[int], data: st.DataObject) -> None:
    """Whatever the shares, zeros and short batches included; the inputs get their gradient as well."""
    module, batch = model(), vectors(data.draw(st.integers(1, sum(shards))))
    expected, plain = whole_batch(module, batch), copy.deepcopy(module)
    leaf, mine = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    output = data_parallel(module, mine, ["cpu"] * len(shards), shard_sizes=shards)
    wanted = plain(leaf)
    assert torch.allclose(output, wanted, atol=1e-6)
    loss_of(output).backward()
    loss_of(wanted).backward()
    assert_same(gradients(module) | {"x": mine.grad}, expected | {"x": leaf.grad})


@pytest.mark.parametrize(
    ("num_samples", "shares", "sizes"),
    [
        (13, {}, [3, 4, 3, 3]),
        (13, {"shard_sizes": (1, 4, 4, 4)}, [1, 4, 4, 4]),
        (7, {"shard_sizes": (1, 4, 4, 4)}, [1, 2, 2, 2]),
        (13, {"gpu0_bsz": 1}, [1, 4, 4, 4]),
        (13, {"gpu0_bsz": 0}, [5, 4, 4]),
        (2, {}, [1, 1]),
    ],
)
def test_who_gets_how_many(num_samples: int, shares: dict[str, Any], sizes: list[int]) -> None:
    """Even shares unless they are given; GPU 0 gets no remainder."""
    assert sizes_of(num_samples=num_samples, num_devices=4, **shares) == sizes


def test_it_may_be_differentiated_again() -> None:
    """Parameters as well: a gradient penalty is that of one device."""
    module, batch = model(), vectors(6)
    plain = copy.deepcopy(module)
    for each in (plain, module):
        output = each(batch) if each is plain else data_parallel(each, batch, ["cpu"] * 3)
        slopes = torch.autograd.grad(loss_of(output), list(each.parameters()), create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
    assert_same(gradients(module), gradients(plain), tolerance=2e-5)


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_keywords_and_nesting_are_split_as_inputs_are(num_devices: int, dim: int) -> None:
    """Tuples are positional arguments, keywords are split along the same dimension, plain values reach everybody."""

    def forward(module: Call, x: Tensor, parts: dict[str, Tensor], *, scale: float, shift: Tensor) -> Tensor:
        return (x + parts["y"]) * scale * module.scale + shift

    x = torch.arange(12.0).view(3, 4)
    kwargs = {"scale": 2.0, "shift": torch.ones(3, 4)}
    inputs = (x, {"y": torch.full((3, 4), 5.0)})
    got = data_parallel(Call(forward), inputs, ["cpu"] * num_devices, dim=dim, module_kwargs=kwargs)
    assert torch.equal(got, (x + 5) * 2 + 1)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_without_samples_there_is_one_call(num_devices: int) -> None:
    """No input, None, and an empty batch run once, on the first device."""
    devices = ["cpu"] * num_devices
    constant = Call(lambda module: module.scale * 3)
    assert data_parallel(constant, (), devices) == data_parallel(constant, None, devices) == 3
    assert data_parallel(nn.Linear(3, 2), torch.zeros(0, 3), devices).shape == (0, 2)


def test_the_loss_may_be_computed_in_the_replicas() -> None:
    """With loss_fn, the last of the inputs are targets, and the loss is the whole batch's."""
    module, batch, targets = model(), vectors(7), torch.randn(7, 3)
    wanted = nn.functional.mse_loss(module(batch), targets)
    loss = data_parallel(module, (batch, targets), ["cpu"] * 3, shard_sizes=(1, 2, 4), loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(loss, wanted)


def test_replicas_may_have_threads() -> None:
    """Over a link that says so."""
    module, batch = model(), vectors(6)
    torch.testing.assert_close(data_parallel(module, batch, ["cpu"] * 3, link=ThreadedLink(3)), module(batch))


def test_devices_are_the_modules_own_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing named it is a plain call."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module, batch = model(), vectors(4)
    assert torch.equal(data_parallel(module, batch), module(batch))
    assert torch.equal(data_parallel(module, batch, output_device=-1), module(batch))


@pytest.mark.parametrize(
    ("shares", "error", "message"),
    [
        ({"shard_sizes": (1, 2)}, InvalidSplitError, "has 2 shares for 3 devices"),
        ({"shard_sizes": (1, 1, 1)}, InvalidSplitError, "6 samples does not fit the tuned shards 1 + 1 + 1 = 3"),
        ({"gpu0_bsz": 7}, InvalidSplitError, "gpu0_bsz=7 exceeds the first micro-batch, of 6 samples, by 1"),
        ({"gpu0_bsz": 1, "shard_sizes": (2, 2, 2)}, InvalidSplitError, "expected one of them"),
        ({"module_kwargs": {"mask": torch.zeros(5)}}, ConfigError, "mask"),
    ],
)
def test_what_cannot_be_split_is_refused(shares: dict[str, Any], error: type[Exception], message: str) -> None:
    """As by the wrapper, with the arithmetic."""
    with pytest.raises(error, match=re.escape(message)):
        data_parallel(model(), vectors(6), ["cpu"] * 3, **shares)
