"""An nn.DataParallel by type: what people's saving, unwrapping and copying code finds, and what it does not."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from splittune.hardware import resolve_hardware
from splittune.parallel import BalancedDataParallel, accumulate
from splittune.split import BatchSplit
from tests.parallel.models import assert_same, gradients, loss_of, mlp, vectors, whole_batch

SPLIT = BatchSplit(global_batch_size=4, accumulation_steps=1, shard_sizes=(1, 3))


def on_devices(module: nn.Module) -> BalancedDataParallel:
    return BalancedDataParallel(module=module, shard_sizes=(1, 3), device_ids=["cpu", "cpu"])


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, saved_and_loaded, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "torch.save", "pickle"],
)


# what its users expect


def test_it_is_a_data_parallel() -> None:
    """Code that unwraps before it saves or evaluates finds the module, and the attributes that go with it."""
    module = mlp()
    model = BalancedDataParallel(1, module, ["cpu", "cpu"], dim=1)
    assert isinstance(model, nn.DataParallel)
    unwrapped = model.module if isinstance(model, nn.DataParallel) else model
    assert unwrapped is module
    assert list(unwrapped.state_dict()) == list(module.state_dict())
    assert (model.dim, len(model.device_ids)) == (1, 2)
    assert model.output_device == model.src_device_obj == torch.device("cpu")


def test_cuda_devices_are_numbered_as_there() -> None:
    """``f"cuda:{model.device_ids[0]}"`` is what people write: cards are told by their numbers, and
    are devices besides."""
    model = BalancedDataParallel(1, mlp(), [1, "cuda:0", torch.device("cuda", 3)])
    assert model.device_ids == [1, 0, 3]
    assert f"cuda:{model.device_ids[0]}" == "cuda:1" == str(model.devices[0]) == str(model.output_device)


def test_making_one_looks_for_no_card_and_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.DataParallel's own constructor would do both."""

    def unexpected(*_: Any, **__: Any) -> None:
        raise AssertionError("nn.DataParallel's constructor was run")

    monkeypatch.setattr(nn.DataParallel, "__init__", unexpected)
    assert on_devices(mlp())(vectors(4)).shape == (4, 3)


@pytest.mark.parametrize("step", ["scatter", "replicate", "parallel_apply", "gather"])
def test_its_steps_are_neither_taken_nor_overridden(step: str) -> None:
    """Someone who overrides nn.DataParallel's steps would be ignored: it is refused when the class is made."""
    with pytest.raises(TypeError, match=re.escape(f"{step}() was called: expected none")):
        getattr(on_devices(mlp()), step)([], {}, [0])
    with pytest.raises(TypeError, match=re.escape(f"Mine overrides {step}(): expected none")):
        type("Mine", (BalancedDataParallel,), {step: lambda self, *args: None})


def test_a_subclass_may_add_what_it_likes() -> None:
    """Passing attributes on to the module is what people subclass for."""

    class Transparent(BalancedDataParallel):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    module = mlp()
    module.vocabulary = 11
    assert Transparent(1, module, ["cpu", "cpu"]).vocabulary == 11


# copies and files


@COPIES
def test_a_copy_on_devices_trains_by_itself(copied: Callable[[Any], Any]) -> None:
    """A copy has the shares, the devices and its own parameters."""
    module, batch = mlp(), vectors(4)
    expected = whole_batch(module, batch)
    model = on_devices(module)
    twin = copied(model)
    assert (twin.shard_sizes, twin.devices, twin.output_device) == (
        model.shard_sizes,
        model.devices,
        model.output_device,
    )
    loss_of(twin(batch)).backward()
    assert_same(gradients(twin), expected)
    assert all(parameter.grad is None for parameter in module.parameters())


@COPIES
@pytest.mark.parametrize("metered", [False, True], ids=["unmetered", "metered"])
def test_a_copy_on_virtual_gpus_trains_by_itself(copied: Callable[[Any], Any], metered: bool) -> None:
    """Inside the meter as well, where every storage is somebody's, and in the middle of a window."""
    module, batch = mlp(), vectors(4)
    expected = whole_batch(module, batch)
    hardware = resolve_hardware("2xT4")
    model = hardware.wrap(module, SPLIT)
    with hardware.metered() if metered else nullcontext():
        with model.no_sync():
            (loss_of(model(batch[:2])) / 2).backward()
        twin = copied(model)
        twin.zero_grad()
        (loss_of(model(batch[2:])) / 2).backward()
        for micro in accumulate(twin, batch.split(2)):
            (loss_of(twin(micro)) / 2).backward()
    assert_same(gradients(model), expected)
    assert_same(gradients(twin), expected)


def test_a_deep_copy_lives_on_the_same_virtual_gpus() -> None:
    """Its parameters count as GPU 0's, whether it was copied inside the meter or before."""
    model = resolve_hardware("2xT4").wrap(nn.Linear(1000, 100), SPLIT)
    hardware = model._link._hardware
    with hardware.metered():
        alone = hardware.allocated_bytes()[0]
        inside = copy.deepcopy(model)
        assert hardware.allocated_bytes()[0] == 2 * alone
        del inside
    twin = copy.deepcopy(model)
    with hardware.metered():
        assert hardware.allocated_bytes()[0] == 2 * alone
    del twin
    with hardware.metered():
        assert hardware.allocated_bytes()[0] == alone


def test_what_was_saved_has_virtual_gpus_of_its_own() -> None:
    """Loaded anywhere, it runs on cards like those it was saved from, other programs on them included."""
    model = resolve_hardware("1xT4:occupied=2GiB,1xT4").wrap(mlp(), SPLIT)
    loaded = saved_and_loaded(model)
    hardware = loaded._link._hardware
    assert hardware is not model._link._hardware
    assert hardware.spec == model._link._hardware.spec
    with hardware.metered():
        loss_of(loaded(vectors(4))).backward()
        assert hardware.allocated_bytes()[0] > 0


@pytest.mark.parametrize("metered", [False, True], ids=["unmetered", "metered"])
def test_an_average_of_the_weights_is_kept_up(metered: bool) -> None:
    """AveragedModel copies the wrapper, follows it, and evaluates on the same devices."""
    hardware = resolve_hardware("2xT4")
    model, batch = hardware.wrap(mlp(), SPLIT), vectors(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hardware.metered() if metered else nullcontext():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        weights: list[Tensor] = []
        for _ in range(3):
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            weights.append(model.module[0].weight.detach().clone())
        with torch.no_grad():
            output = average(batch)
    first, second, third = weights
    wanted = 0.25 * first + 0.25 * second + 0.5 * third
    assert torch.allclose(average.module.module[0].weight, wanted, atol=1e-6)
    assert torch.allclose(output, copy.deepcopy(average.module.unwrap())(batch), atol=1e-6)
