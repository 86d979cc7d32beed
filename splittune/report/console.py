"""A result on a console: the baseline beside the best, where memory went, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from splittune.report.words import shape_of, speed_of
from splittune.units import format_bytes, format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splittune.config import SplitConfig
    from splittune.hardware import DeviceMemory
    from splittune.report.tune_result import TuneResult

WHY_STOPPED = {
    "converged": "The search ended because no other split is expected to be faster.",
    "max_trials": "The search ended at its limit of trials; more may find a faster split.",
    "timeout": "The search ended at its limit of time; more may find a faster split.",
    "space exhausted": "The search ended because every other split is measured or known not to fit.",
}


def show_result(result: TuneResult, console: Console) -> None:
    """The baseline beside the best, where every device's memory went under each, and why."""
    modelled = ", modelled" if result.config.is_modelled else ""
    rows = [("even split", result.baseline), ("tuned split", result.best)]
    table = Table("", "steps x shards", f"samples/s{modelled}", "time of a step", title="Baseline and best")
    for name, measurement in rows:
        if measurement is None:
            table.add_row(name, "fits at no number of steps", "", "")
        else:
            speed = speed_of(measurement).removesuffix(" samples/s")
            table.add_row(name, shape_of(measurement.split), speed, format_time(measurement.step_time_s or 0.0))
    console.print(table)
    if result.speedup is not None:
        console.print(f"{result.speedup:.2f} times the even split's throughput{modelled}.", highlight=False)
    if result.stopped in WHY_STOPPED:
        console.print(WHY_STOPPED[result.stopped], highlight=False)
    console.print("\nMemory at the peak   # held by others   = this job   . free", highlight=False, markup=False)
    for index, device in enumerate(result.config.devices):
        title = f"GPU {index}  {device.name}"
        for name, measurement in rows:
            if measurement is not None and measurement.memory:
                bar = _memory_bar(measurement.memory[index])
                console.print(f"{title:<18} {name:<12} {bar}", highlight=False, markup=False)
                title = ""  # once a card
    console.print(f"\n{result.explanation}", highlight=False, markup=False)


def show_memory_plan(config: SplitConfig, peaks: Sequence[DeviceMemory], console: Console) -> None:
    """What training really took on every device, beside what the config planned."""
    table = Table("device", "planned peak", "peak in training", "", title="Memory reserved")
    for device, planned, peak in zip(config.devices, config.planned_peak_reserved_bytes, peaks, strict=True):
        within = peak.peak_reserved_bytes <= planned
        table.add_row(
            f"GPU {device.index}  {device.name}",
            format_bytes(planned),
            format_bytes(peak.peak_reserved_bytes),
            "as planned" if within else "MORE THAN PLANNED",
        )
    console.print(table)


def _memory_bar(memory: DeviceMemory, width: int = 16) -> str:
    """``####====......`` for what others hold, what this job took, and what was left."""
    outside = round(width * memory.outside_bytes / memory.total_bytes)
    taken = min(round(width * memory.peak_reserved_bytes / memory.total_bytes), width - outside)
    bar = "#" * outside + "=" * taken + "." * (width - outside - taken)
    return f"{bar}  {format_bytes(memory.peak_reserved_bytes)}, {format_bytes(memory.headroom_bytes)} left"
