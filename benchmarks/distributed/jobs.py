"""What the benchmarks of ranks train, and the config for a split that nobody tuned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from splittune import BatchSplit, SplitConfig
from splittune.hardware import Device

WIDTH = 8
NUM_CLASSES = 4


def config_for(split: BatchSplit) -> SplitConfig:
    """A config for ranks on the CPU."""
    devices = tuple(Device(index=i, name="cpu", torch_device="cpu", total_bytes=1) for i in range(split.num_devices))
    return SplitConfig(
        split=split,
        devices=devices,
        min_headroom_bytes=(0,) * split.num_devices,
        is_modelled=True,
        strategy="ddp",
        created="2026-01-01T00:00:00+00:00",  # the same on every rank
    )


def net(seed: int, dtype: torch.dtype) -> nn.Module:
    """A small network whose gradient is of every size, from its first layer to its last."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, NUM_CLASSES)]
        return nn.Sequential(*layers).to(dtype)


def loader_of(num_samples: int, batch_size: int, seed: int, dtype: torch.dtype) -> DataLoader[Any]:
    """Shuffled, by a generator of its own."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, WIDTH, generator=drawn, dtype=torch.float64).to(dtype)
    y = torch.randint(NUM_CLASSES, (num_samples,), generator=drawn)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True, generator=drawn)


def gradient_of(model: nn.Module) -> Tensor:
    """All gradients in one row."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
