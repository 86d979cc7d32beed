"""A small job for tests of its parts, and its step on two devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from splittune.parallel import BalancedDataParallel
from splittune.split import BatchSplit
from splittune.training import TrainingStep, TrainingTask, read_batches

BATCH = (torch.randn(6, 4), torch.randn(6, 2))


def make_model(*, trainable: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).requires_grad_(trainable)


def task(**options: Any) -> TrainingTask:
    return TrainingTask(options.pop("model", make_model()), [BATCH], **options)


def wrapped(model: nn.Module, shard_sizes: tuple[int, ...] = (2, 4)) -> BalancedDataParallel:
    return BalancedDataParallel(module=model, shard_sizes=shard_sizes, device_ids=["cpu"] * len(shard_sizes))


def step_of(job: TrainingTask, split: BatchSplit) -> TrainingStep:
    return TrainingStep(
        job, wrapped(job.model, split.shard_sizes), job.make_optimizer(), split, read_batches(job.loader)
    )


def two_steps(global_batch_size: int = 6) -> BatchSplit:
    return BatchSplit.even(global_batch_size=global_batch_size, accumulation_steps=2, num_devices=2)
