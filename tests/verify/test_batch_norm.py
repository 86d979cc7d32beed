"""A loader whose last batch is short, and a model with BatchNorm: the run comes to its end."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from splittune import BatchSplit, SplitConfig, TrainingTask, verify
from splittune.hardware import resolve_hardware


@pytest.mark.parametrize("last", [2, 3, 6, 7])
def test_a_short_last_batch_is_verified(last: int) -> None:
    """The loader's short batch is among the steps, and takes fewer cards than the full ones."""
    hardware = resolve_hardware("4xT4")
    config = SplitConfig(
        split=BatchSplit(global_batch_size=32, accumulation_steps=1, shard_sizes=(4, 9, 9, 10)),
        devices=hardware.devices,
        min_headroom_bytes=(0,) * 4,
        virtual_spec=hardware.spec,
        is_modelled=True,
    )
    size = 32 + last
    samples = TensorDataset(torch.randn(size, 8), torch.randint(3, (size,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    result = verify(config, TrainingTask(model, DataLoader(samples, batch_size=32)), num_steps=4)
    assert result.is_verified
    assert len(result.losses) == 4
