"""What is changed on a module between two calls is seen by all its replicas, not by the first one alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splittune.hardware import resolve_hardware
from splittune.parallel import BalancedDataParallel
from splittune.split import BatchSplit


class Two(nn.Module):
    """Two containers side by side, an operation between them, and hooks to come."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Sequential(nn.Tanh()), nn.Sequential(nn.Sigmoid())
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3, requires_grad=True))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x) * 2 - 1) * self.scale + self.shift)


def move_a_child(model: nn.Module) -> None:
    model.before._modules["1"] = model.after._modules.pop("0")


def triple(_module: nn.Module, *arguments: Any) -> Any:
    """As a hook before or after a forward: the latest argument times 3."""
    value = arguments[-1][0] if isinstance(arguments[-1], tuple) else arguments[-1]
    return value * 3 - 1


def move_a_hook(model: nn.Module) -> None:
    model.layer._forward_pre_hooks.clear()
    model.layer.register_forward_hook(triple)


def scale_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.scale.mul_(5)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a child moves to the container before its own": move_a_child,
    "a hook before a forward becomes one after it": move_a_hook,
    "a learning buffer changes in place": scale_in_place,
    "a learning buffer is another one": lambda model: setattr(
        model, "scale", torch.full((3,), 7.0, requires_grad=True)
    ),
    "a buffer begins to learn": lambda model: model.shift.requires_grad_(),
    "a buffer changes in place": lambda model: model.shift.add_(1),
    "a parameter is another one": lambda model: setattr(model.layer, "weight", nn.Parameter(torch.ones(3, 3))),
    "a parameter has other data": lambda model: setattr(model.layer.weight, "data", torch.ones(3, 3)),
    "an attribute": lambda model: setattr(model, "before", nn.Sigmoid()),
}


@pytest.mark.parametrize("trains", [False, True], ids=["evaluation", "window"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_two_calls_is_seen(change: Callable[[Any], object], trains: bool) -> None:
    """Every replica computes what the module itself does now."""
    model, x = Two(), torch.randn(4, 3)
    model.layer.register_forward_pre_hook(triple)
    split = BatchSplit(global_batch_size=4, accumulation_steps=1, shard_sizes=(1, 2, 1))
    wrapped = resolve_hardware("3xRTX3090").wrap(model, split)
    if trains:
        with wrapped.no_sync():
            wrapped(x)  # its backward is still to come
    else:
        with torch.no_grad():
            wrapped(x)
    change(model)
    with torch.set_grad_enabled(trains):
        torch.testing.assert_close(wrapped(x), model(x))


class Rotated(nn.Module):
    """Its gradient is conjugated in name alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("turned", torch.complex(torch.ones(3), torch.ones(3)).conj())
        self.register_buffer("imaginary", torch.complex(torch.ones(3), torch.ones(3)).conj().imag)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.conj() * x * self.turned + self.imaginary).abs()


@pytest.mark.parametrize("devices", [["cpu"] * 3, None], ids=["one place", "virtual GPUs"])
def test_conjugated_gradients_and_buffers(devices: list[str] | None) -> None:
    """They add up as on one device, over accumulation steps too."""
    model, x = Rotated(), torch.randn(8, 3)
    model(x).square().mean().backward()
    expected, model.weight.grad = model.weight.grad, None
    split = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 2, 1))
    hardware = resolve_hardware("3xRTX3090")
    with hardware.metered():
        wrapped = (
            hardware.wrap(model, split)
            if devices is None
            else BalancedDataParallel(module=model, shard_sizes=split.shard_sizes, device_ids=devices)
        )
        with wrapped.no_sync():
            (wrapped(x[:4]).square().mean() / 2).backward()
        (wrapped(x[4:]).square().mean() / 2).backward()
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_buffers_reach_every_replica() -> None:
    """They have no plain memory to be joined in: each goes by itself."""

    class Quantized(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("table", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table.dequantize()

    model, x = Quantized(), torch.randn(4, 3)
    wrapped = BalancedDataParallel(module=model, shard_sizes=(1, 3), device_ids=["cpu"] * 2)
    torch.testing.assert_close(wrapped(x), model(x))
