"""Jobs to verify, the configs they are verified under, and a finished verification."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from splittune import SplitConfig, TrainingTask, Verification
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual.hardware import VirtualHardware
from splittune.split import BatchSplit
from splittune.units import MIB

AMPLE = "2xT400-4GB"


def left_free(mib: int, second: str = "1xT400-4GB") -> str:
    """Two cards, of the first of which other programs leave this much."""
    context = VirtualHardware.__init__.__globals__["CUDA_CONTEXT_BYTES"]
    return f"1xT400-4GB:occupied={(4096 * MIB - context - mib * MIB) / MIB}MiB,{second}"


def config_for(
    shards: tuple[int, ...], k: int = 1, *, devices: str = AMPLE, size: int = 0, **fields: Any
) -> SplitConfig:
    hardware = resolve_hardware(devices)
    split = BatchSplit(global_batch_size=size or k * sum(shards), accumulation_steps=k, shard_sizes=shards)
    defaults: dict[str, Any] = {
        "min_headroom_bytes": (0,) * len(shards),
        "devices": hardware.devices,
        "virtual_spec": hardware.spec,
        "is_modelled": True,
    }
    return SplitConfig(split=split, **defaults | fields)


class Texts:
    """Batches of 8 padded texts, one batch of each length."""

    def __init__(self, *lengths: int, last: int = 8) -> None:
        sizes = [8] * (len(lengths) - 1) + [last]
        self.batches = [(torch.randn(n, length, 16), torch.randn(n)) for n, length in zip(sizes, lengths, strict=True)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Reader(nn.Module):
    """(N, length, 16) to (N,); notes what it is given, and in which mode: length, samples, is
    training, has gradients."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.drop, self.frozen = nn.Dropout(0.2), nn.Dropout(0.2).eval()
        self.seen: list[tuple[int, int, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.shape[1], x.shape[0], self.training, torch.is_grad_enabled()))
        hidden = self.drop(self.first(x).relu())
        assert self.frozen.training is False
        return self.last(self.norm(hidden.mean(1))).squeeze(1)


def task_of(model: nn.Module, loader: Any, **options: Any) -> TrainingTask:
    return TrainingTask(model, loader, **{"loss_fn": functional.mse_loss, **options})


def lengths_trained(model: Reader) -> list[int]:
    return [length for length, _, trains, has_gradients in model.seen if trains and has_gradients]


class Evaluated(nn.Module):
    """Trains on little, and evaluates with a tensor of as many MiB as told."""

    def __init__(self, eval_mib: int) -> None:
        super().__init__()
        self.linear, self.eval_mib = nn.Linear(4, 1), eval_mib

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            x = x + x.new_zeros(self.eval_mib * MIB // 4).sum()
        return self.linear(x)


SMALL = [(torch.randn(4, 4), torch.randn(4, 1))] * 2


def verification(**fields: Any) -> Verification:
    hardware = resolve_hardware(left_free(46))
    with hardware.metered():
        memory = hardware.memory()
    whole: dict[str, Any] = {
        "config": config_for(
            (1, 1),
            devices=left_free(46),
            min_headroom_bytes=(5 * MIB, 0),
            planned_peak_reserved_bytes=(40 * MIB, 40 * MIB),
        ),
        "devices": hardware.devices,
        "memory": tuple(replace(each, peak_reserved_bytes=42 * MIB) for each in memory),
        "training_peak_reserved_bytes": (42 * MIB, 42 * MIB),
        "evaluation_peak_reserved_bytes": (None, None),
        "losses": (1.0,),
        "num_evaluations": 1,
    }
    return Verification(**whole | fields)
