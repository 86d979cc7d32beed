"""Rows of a plan, made up: two cards, batch 64, a tuned split beside the even one."""

from __future__ import annotations

from typing import Any

from splittune.hardware import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.capacity.row import CapacityRow, LargestMicroBatch
from splittune.search import Trial
from splittune.split import BatchSplit
from splittune.training.module_memory import ModuleMemory
from splittune.units import GIB

CARDS = tuple(Device(index=i, name="CARD", torch_device="cpu", total_bytes=8 * GIB) for i in range(2))
TUNED = BatchSplit(global_batch_size=64, accumulation_steps=2, shard_sizes=(8, 24))
EVEN = BatchSplit(global_batch_size=64, accumulation_steps=4, shard_sizes=(8, 8))
ONE_STEP = BatchSplit(global_batch_size=64, accumulation_steps=1, shard_sizes=(32, 32))
MODULES = (
    ModuleMemory(name="blocks.*.mlp", count=4, parameter_bytes=GIB // 4, activation_bytes=GIB // 16),
    ModuleMemory(name="norm", count=1, parameter_bytes=GIB // 64, activation_bytes=None),
)


def memory(device: int, gib: float, *, outside_gib: float = 0.25) -> DeviceMemory:
    return DeviceMemory(
        device=device,
        total_bytes=8 * GIB,
        outside_bytes=int(outside_gib * GIB),
        peak_allocated_bytes=int(gib * GIB),
        peak_reserved_bytes=int(gib * GIB),
    )


def ran(split: BatchSplit, step_time_s: float = 0.5) -> Measurement:
    """GPU 0: 2.5 GiB, 1/8 a sample of its share and 3/64 of the micro-batch; GPU 1: 1 GiB and 1/8."""
    peaks = (
        2.5 + split.shard_sizes[0] / 8 + split.micro_batch_size * 3 / 64,
        1 + split.shard_sizes[1] / 8,
    )
    return Measurement(
        split=split,
        outcome=Outcome.OK,
        whole_step_times_s=(step_time_s,),
        memory=tuple(memory(device, gib) for device, gib in enumerate(peaks)),
    )


def lacking(split: BatchSplit) -> Measurement:
    return Measurement(split=split, outcome=Outcome.OUT_OF_MEMORY, message="device 1: CUDA out of memory")


def trials_of(*runs: Measurement) -> tuple[Trial, ...]:
    return tuple(
        Trial(number=number, kind="search", measurement=run, reason="a guess") for number, run in enumerate(runs)
    )


def row(**fields: Any) -> CapacityRow:
    """64 samples on two cards: 128 samples/s where the even split has 80."""
    runs = (
        ran(BatchSplit.even(global_batch_size=64, accumulation_steps=8, num_devices=2)),
        ran(EVEN, 0.8),
        ran(TUNED, 0.5),
        lacking(ONE_STEP),
    )
    given: dict[str, Any] = {
        "devices": "2xCARD",
        "cards": CARDS,
        "global_batch_size": 64,
        "best": runs[2],
        "baseline": runs[1],
        "trials": trials_of(*runs),
        "modules": MODULES,
        "largest": LargestMicroBatch(
            split=BatchSplit(global_batch_size=40, accumulation_steps=1, shard_sizes=(10, 30)), is_measured=True
        ),
    }
    return CapacityRow(**given | fields)


def lacking_row(**fields: Any) -> CapacityRow:
    """On the same cards nothing fits."""
    given: dict[str, Any] = {
        "best": None,
        "baseline": None,
        "trials": trials_of(lacking(ONE_STEP), lacking(TUNED)),
        "largest": None,
        "message": "no split fits: device 1 lacked 2.00 GiB.",
        "global_batch_size": 128,
    }
    return row(**given | fields)
