"""A finished search over two cards, and a screen to show it on."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from splittune.config import SplitConfig
from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report import TuneResult
from splittune.search import Trial
from splittune.split import BatchSplit, SplitSpace
from splittune.units import GIB

SPLIT = BatchSplit(global_batch_size=64, accumulation_steps=2, shard_sizes=(8, 24))
EVEN = BatchSplit(global_batch_size=64, accumulation_steps=4, shard_sizes=(8, 8))
SPACE = SplitSpace(global_batch_size=64, num_devices=2)


def memory(device: int, *, outside_gib: float = 1, reserved_gib: float = 2) -> DeviceMemory:
    reserved = int(reserved_gib * GIB)
    return DeviceMemory(
        device=device,
        total_bytes=8 * GIB,
        outside_bytes=int(outside_gib * GIB),
        peak_allocated_bytes=reserved,
        peak_reserved_bytes=reserved,
    )


def ran(split: BatchSplit, step_time_s: float, outcome: Outcome = Outcome.OK, **fields: Any) -> Measurement:
    """512 MiB are left on GPU 0."""
    return Measurement(
        split=split,
        outcome=outcome,
        whole_step_times_s=(step_time_s,),
        **{"memory": (memory(0, outside_gib=4, reserved_gib=3.5), memory(1)), **fields},
    )


def trial(measurement: Measurement, number: int = 3, kind: str = "search") -> Trial:
    return Trial(number=number, kind=kind, measurement=measurement, reason="k=2: a first guess")  # type: ignore[arg-type]


BEST, BASELINE = ran(SPLIT, 0.5), ran(EVEN, 0.8)
FAILED = Measurement(split=EVEN, outcome=Outcome.OUT_OF_MEMORY, message="device 0: CUDA out of memory")


def result(
    baseline: Measurement | None = BASELINE, *, best: Measurement = BEST, is_modelled: bool = True, **fields: Any
) -> TuneResult:
    num_devices = best.split.num_devices
    config = SplitConfig(
        split=best.split,
        devices=tuple(
            Device(index=i, name=f"CARD{min(i, 1)}", torch_device="cpu", total_bytes=8 * GIB)
            for i in range(num_devices)
        ),
        min_headroom_bytes=(0,) * num_devices,
        planned_peak_reserved_bytes=tuple(each.peak_reserved_bytes for each in best.memory),
        virtual_spec="2xCARD" if is_modelled else None,
        is_modelled=is_modelled,
        loss_placement=best.loss_placement,
    )
    return TuneResult(**{"best": best, "baseline": baseline, "trials": (), "config": config, **fields})


class Screen:
    """A console, and what was written on it."""

    def __init__(self, *, width: int = 100, is_terminal: bool = False) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, width=width, force_terminal=is_terminal, legacy_windows=False)

    @property
    def text(self) -> str:
        return self.file.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()
