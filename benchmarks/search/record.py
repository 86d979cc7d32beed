"""``python -m benchmarks.search.record``: foretells every split of some real jobs on virtual cards, and keeps it.

It takes ten minutes on one core, for the step of each job is run on shapes for each split. What is
kept is read by `benchmarks.search.recorded`. All of it is modelled. Random weights, made-up data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.jobs.gpu_models import SmallViT, loss_of_tokens
from benchmarks.search.recorded import COLUMNS, RECORDED, read_rows, row_of, write_rows
from benchmarks.wrapper.virtual import resnet18
from splittune import plan
from splittune.demo import ByteGPT
from splittune.hardware import resolve_hardware
from splittune.split import BatchSplit, Shares, SplitSpace
from splittune.training import TrainingTask

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A job on a machine, all of whose splits are wanted."""

    job: str
    devices: str
    global_batch_size: int
    shares: Shares = "gpu0"


RECORDINGS = (
    Recording(job="GPT", devices="1xRTX3060-12GB:occupied=3GiB,1xRTX3060-12GB", global_batch_size=24),
    Recording(job="GPT", devices="1xRTX3090:occupied=12GiB,2xRTX3090", global_batch_size=48),
    Recording(job="GPT", devices="1xT4,1xRTX3060-12GB,1xRTX2080Ti", global_batch_size=10, shares="each"),
    Recording(job="GPT", devices="1xRTX3060-12GB,1xRTX2080Ti,1xRTX3070", global_batch_size=18, shares="each"),
    Recording(job="GPT", devices="1xRTX3090:occupied=14GiB,3xRTX4090", global_batch_size=64),
    Recording(job="MLP", devices="3xRTX2080Ti", global_batch_size=32),
    Recording(job="ResNet-18", devices="1xRTX3060-12GB,1xRTX4090", global_batch_size=64),
    Recording(job="ResNet-18", devices="1xRTX2080Ti:occupied=6GiB,2xRTX2080Ti", global_batch_size=144),
    Recording(job="ViT", devices="1xT400-4GB,2xRTX3070", global_batch_size=64),
    Recording(job="ViT", devices="1xT400-4GB:occupied=1GiB,2xT400-4GB", global_batch_size=160),
)


def task_of(job: str, global_batch_size: int) -> TrainingTask:
    """The job of this name with this batch."""
    torch.manual_seed(0)
    model, batch, options = JOBS[job](global_batch_size)
    return TrainingTask(model, [batch], global_batch_size=global_batch_size, **options)


def _gpt(batch_size: int) -> tuple[nn.Module, Batch, dict[str, Any]]:
    """Two layers at 1,024 tokens of 32,000 kinds: the logits of the whole micro-batch meet on GPU 0."""
    tokens = torch.zeros(batch_size, 1024, dtype=torch.int64)
    model = ByteGPT(width=1024, num_layers=2, num_heads=16, context=1024, num_tokens=32_000)
    return model, (tokens, tokens), {"loss_fn": loss_of_tokens, "autocast_dtype": torch.bfloat16}


def _resnet(batch_size: int) -> tuple[nn.Module, Batch, dict[str, Any]]:
    """Images of 160 x 160, in float32."""
    batch = (torch.zeros(batch_size, 1, 160, 160), torch.zeros(batch_size, dtype=torch.int64))
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    return resnet18(), batch, {"optimizer": optimizer, "loss_fn": nn.functional.cross_entropy}


def _vit(batch_size: int) -> tuple[nn.Module, Batch, dict[str, Any]]:
    """Three layers of ViT-Base over 224 x 224 pixels, in bfloat16."""
    batch = (torch.zeros(batch_size, 3, 224, 224), torch.zeros(batch_size, dtype=torch.int64))
    model = SmallViT(side=224, patch=16, width=768, num_layers=3)
    return model, batch, {"loss_fn": nn.functional.cross_entropy, "autocast_dtype": torch.bfloat16}


def _mlp(batch_size: int) -> tuple[nn.Module, Batch, dict[str, Any]]:
    """Parameters and hardly any activations: the copies of them are most of a step."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(6144, 6144), nn.ReLU())]
    batch = (torch.zeros(batch_size, 6144), torch.zeros(batch_size, dtype=torch.int64))
    return nn.Sequential(*layers, nn.Linear(6144, 10)), batch, {"loss_fn": nn.functional.cross_entropy}


JOBS: dict[str, Callable[[int], tuple[nn.Module, Batch, dict[str, Any]]]] = {
    "GPT": _gpt,
    "ResNet-18": _resnet,
    "ViT": _vit,
    "MLP": _mlp,
}


def splits_of(recording: Recording) -> list[BatchSplit]:
    """All splits at the fewest steps of each micro-batch size: with more of them its micro-steps are the same."""
    space = SplitSpace(
        global_batch_size=recording.global_batch_size,
        num_devices=len(resolve_hardware(recording.devices).devices),
        shares=recording.shares,
    )
    fewest: dict[int, int] = {}
    return [
        split
        for split in space
        if fewest.setdefault(split.micro_batch_size, split.accumulation_steps) == split.accumulation_steps
    ]


def recorded_rows(recording: Recording) -> Iterator[dict[str, str]]:
    """A row for each split."""
    devices = resolve_hardware(recording.devices).devices
    headrooms = tuple(device.total_bytes // 20 for device in devices)
    task = task_of(recording.job, recording.global_batch_size)
    found = plan(
        task, recording.devices, splits=splits_of(recording), min_headroom_bytes=headrooms, progress=False
    ).measurements
    for measurement in found:
        yield row_of(recording.job, recording.devices, recording.shares, headrooms, measurement)


def main() -> None:
    """All recordings, or with the argument ``missing`` those that are not kept yet."""
    kept = read_rows(RECORDED) if sys.argv[1:] == ["missing"] else []
    rows: dict[Recording, list[dict[str, str]]] = {}
    for recording in RECORDINGS:
        rows[recording] = [row for row in kept if _is_of(row, recording)] or list(recorded_rows(recording))
        print(recording, len(rows[recording]), flush=True)
        known = [row for recorded in rows.values() for row in recorded]
        write_rows(RECORDED, COLUMNS, known + [row for row in kept if row not in known])
    write_rows(RECORDED, COLUMNS, [row for recorded in rows.values() for row in recorded])


def _is_of(row: dict[str, str], recording: Recording) -> bool:
    wanted = (recording.job, recording.devices, recording.shares, str(recording.global_batch_size))
    return (row["job"], row["devices"], row["shares"], row["global_batch_size"]) == wanted


if __name__ == "__main__":
    main()
