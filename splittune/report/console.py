"""A result on a console: the answer, both splits side by side, why, and what to see to."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.console import Console

from splittune.profiling.measurement import Outcome
from splittune.report.advice import lines_of
from splittune.report.explain import risks_of
from splittune.report.foretold import describe_foretold
from splittune.report.like_devices import like_devices
from splittune.report.words import (
    CUT_SHORT,
    LEAST_SPEEDUP,
    WHY_STOPPED,
    describe_model_error,
    gpus,
    rate_of,
    shape_of,
    shares_of,
)
from splittune.split.shards import even_shards
from splittune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splittune.config import SplitConfig
    from splittune.hardware import DeviceMemory
    from splittune.profiling.measurement import Measurement
    from splittune.report.tune_result import TuneResult
    from splittune.split import BatchSplit

# Prose is no wider than this, on any screen. A choice.
MAX_WIDTH = 100
# Characters of a bar: a device's room is told to 6 %. A choice.
BAR_WIDTH = 16


def show_result(result: TuneResult, console: Console, *, verbose: bool = False) -> None:
    """Show how much faster it is, both splits side by side, and why.

    If `verbose`, why the search ended and the whole explanation.
    """
    console.print(f"\n{_headline(result)}\n", style="bold", highlight=False, soft_wrap=True)
    for line in _side_by_side(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()
    _print_prose(_faster_even(result), console)
    if verbose:
        _print_prose(WHY_STOPPED.get(result.stopped, ""), console)
        _print_prose(result.explanation, console)
        _print_advice(result, console)
        return
    _print_prose(f"Why: {' '.join(result.facts)}", console)
    if result.remedy:
        _print_prose(f"For more: {result.remedy}.", console)
    _print_advice(result, console)
    if result.foretold is not None:
        _print_prose(describe_foretold(result.foretold, result.best), console)
    if result.config.is_modelled:
        _print_prose(describe_model_error(), console)


def show_notes(result: TuneResult, console: Console) -> None:
    """Show what to see to before training, a line each: the last thing to print, often nothing."""
    cut_short = [CUT_SHORT[result.stopped]] if result.stopped in CUT_SHORT else []
    risks = () if result.config.strategy == "ddp" else risks_of(result.diagnosis)
    for note in (*risks, *result.notes, *cut_short):
        _print_prose(f"note: {note}", console)


def describe_memory_kept(config: SplitConfig, peaks: Sequence[DeviceMemory]) -> str:
    """Whether training kept to it: ``"memory as planned on all 4 GPUs"``, or where it did not."""
    planned = config.planned_peak_reserved_bytes
    over = [peak for peak, plan in zip(peaks, planned, strict=True) if peak.peak_reserved_bytes > plan]
    if not over:
        return "memory as planned" if len(peaks) == 1 else f"memory as planned on all {len(peaks)} GPUs"
    parts = [
        f"{format_bytes(peak.peak_reserved_bytes)} on GPU {peak.device} where {format_bytes(planned[peak.device])} were"
        for peak in over
    ]
    return f"MORE MEMORY THAN PLANNED: {', '.join(parts)}"


def _headline(result: TuneResult) -> str:
    modelled = " (modelled)" if result.config.is_modelled else ""
    best, baseline = result.best, result.baseline
    if baseline is None or result.speedup is None:
        return f"{rate_of(best)} samples/s{modelled}, where no even split fits at any number of accumulation steps"
    if _is_even(result):
        return f"The even split is the fastest that was found: {rate_of(best)} samples/s{modelled}"
    rates = f"{rate_of(best)} instead of {rate_of(baseline)} samples/s{modelled}"
    if result.speedup < LEAST_SPEEDUP:
        return f"As fast as the even split: {rates}"
    return f"{result.speedup:.2f}x faster at the same batch size: {rates}"


def _faster_even(result: TuneResult) -> str:
    """Which even split that was tried is faster than the baseline, the one of fewest steps; mostly empty."""
    baseline = result.baseline
    if baseline is None or baseline.throughput is None or _is_even(result):
        return ""
    runs = [trial.measurement for trial in result.trials if trial.measurement.outcome is Outcome.OK]
    evens = [run for run in runs if _is_spread_evenly(run.split)]
    fastest = max(evens, key=lambda run: run.throughput or 0.0, default=baseline)
    if (fastest.throughput or 0.0) < LEAST_SPEEDUP * baseline.throughput:
        return ""
    return f"The fastest even split that was tried is {shape_of(fastest.split)}: {rate_of(fastest)} samples/s."


def _is_spread_evenly(split: BatchSplit) -> bool:
    return split.shard_sizes == even_shards(split.micro_batch_size, split.num_devices)


def _is_even(result: TuneResult) -> bool:
    """Whether the even split won."""
    best, even = result.best, result.baseline
    return even is not None and (best.split, best.loss_placement) == (even.split, even.loss_placement)


def _side_by_side(result: TuneResult) -> list[str]:
    """A line for each property, with a column for the even split and one for another that won."""
    tuned = None if _is_even(result) else result.best
    both = [("even split", result.baseline), ("tuned split", tuned)]
    shown = [(name, measurement) for name, measurement in both if measurement is not None]
    runs = [measurement for _, measurement in shown]
    rows: list[tuple[str, list[str], str]] = [
        ("", [name for name, _ in shown], ""),
        ("accumulation steps", [str(run.split.accumulation_steps) for run in runs], ""),
        ("samples per GPU", [shares_of(run.split) for run in runs], ""),
    ]
    if any(run.loss_placement == "replica" for run in runs):
        places = {"output": "on GPU 0", "replica": "in each replica"}
        rows.append(("loss computed", [places[run.loss_placement] for run in runs], ""))
    if all(run.memory for run in runs):
        rows += _memory_rows(result, runs)
    first = max(len(label) for label, _, _ in rows)
    width = max(len(cell) for _, cells, _ in rows for cell in cells)
    return [
        f"  {label:<{first}}   {'   '.join(f'{cell:<{width}}' for cell in cells)}   {last}".rstrip()
        for label, cells, last in rows
    ]


def _memory_rows(result: TuneResult, runs: Sequence[Measurement]) -> list[tuple[str, list[str], str]]:
    """A line for GPU 0, and one for every group of like devices, with the fullest of them."""
    devices = result.config.devices
    groups = [(0,), *like_devices(devices[1:], *(run.memory[1:] for run in runs))]
    rows = []
    for group in groups:
        cells = [_bar(max((run.memory[index] for index in group), key=_part_taken)) for run in runs]
        room = min(memory.total_bytes - memory.outside_bytes for memory in (result.best.memory[i] for i in group))
        rows.append((f"peak memory, {gpus(group)}", cells, f"of {format_bytes(room)}"))
    return rows


def _bar(memory: DeviceMemory) -> str:
    """``"####............  1.00 GiB"``: what this job took of what others leave, here 4 GiB."""
    filled = min(BAR_WIDTH, round(BAR_WIDTH * _part_taken(memory)))
    filled = max(filled, 1 if memory.peak_reserved_bytes else 0)
    return f"{'#' * filled}{'.' * (BAR_WIDTH - filled)} {format_bytes(memory.peak_reserved_bytes):>9}"


def _part_taken(memory: DeviceMemory) -> float:
    return memory.peak_reserved_bytes / max(memory.total_bytes - memory.outside_bytes, 1)


def _print_advice(result: TuneResult, console: Console) -> None:
    for line in lines_of(result.advice):
        _print_prose(line, console)


def _print_prose(text: str, console: Console) -> None:
    if text:
        width = min(console.width, MAX_WIDTH) if console.is_terminal else MAX_WIDTH
        filled = textwrap.fill(text, width, break_on_hyphens=False)
        console.print(filled, highlight=False, markup=False, soft_wrap=True)
