"""A plan on a console: the answer in three lines, a row for each machine and batch size, and where the files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from splittune.report.capacity.row import best_row, named_of
from splittune.report.capacity.strategies import compared
from splittune.report.words import count_of, describe_model_error, rate_of, shape_of
from splittune.units import format_bytes, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from splittune.report.capacity.row import CapacityRow

# Below this the even split is called as fast: the console shows two decimals.
LEAST_SPEEDUP = 1.005
_HEADER = (
    "machine",
    "strategy",
    "batch",
    "steps x samples per GPU",
    "samples/s",
    "a step",
    "fullest card",
    "even split",
    "gain",
    "largest micro-batch",
)
NOTHING = "-"


def show_capacity(rows: Sequence[CapacityRow], console: Console) -> None:
    """Show the answer, then the table; everything says that it is modelled."""
    lines = ["", *answer_of(rows), "", *table_of(rows), *notes_of(rows)]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def answer_of(rows: Sequence[CapacityRow]) -> list[str]:
    """Three lines at most: the best machine and batch size, what that gains over the even split, what limits it."""
    best = best_row(rows)
    if best is None or best.best is None:
        return [f"No split fits on {_listed(rows)} (modelled)."]
    run = best.best
    first = (
        f"Best: {rate_of(run)} samples/s (modelled) on {best.devices} at batch {best.global_batch_size}, "
        f"as {shape_of(run.split)}{'' if best.strategy == 'dp' else ', a rank for each card'}"
    )
    return [line for line in (f"{first}.", _gain(best), best.why) if line]


def table_of(rows: Sequence[CapacityRow]) -> list[str]:
    """A line for each row under a header, in columns; strategies of a machine and batch size below one another."""
    cells, right = [_HEADER, *(_cells(row) for row in _side_by_side(rows))], {2, 4, 5, 8, 9}  # numbers
    if all(row.strategy == "dp" for row in rows):
        cells, right = [(line[0], *line[2:]) for line in cells], {column - 1 for column in right}
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    aligned = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return ["Modelled, a row for each machine and batch size:", *aligned]


def _side_by_side(rows: Sequence[CapacityRow]) -> list[CapacityRow]:
    if len({row.strategy for row in rows}) == 1:
        return list(rows)
    keys = list(dict.fromkeys((row.devices, row.global_batch_size) for row in rows))
    return sorted(rows, key=lambda row: keys.index((row.devices, row.global_batch_size)))


def notes_of(rows: Sequence[CapacityRow]) -> list[str]:
    """Which strategy is faster and why, what lacked where nothing fits, and what every figure above rests on."""
    lacking = [
        f"{named_of(row)}, batch {row.global_batch_size}: {row.message}" for row in rows if not row.fits and row.message
    ]
    return [*compared(rows), *lacking, describe_model_error()]


def files_line(folder: Path, written: Sequence[Path]) -> str:
    """``"Saved in runs/plan: capacity.csv, capacity.png, 8 configs (split-...json)"``."""
    tables = [path.name for path in written if path.suffix != ".json"]
    configs = [path.name for path in written if path.suffix == ".json"]
    named = f"{count_of(len(configs), 'config')} ({configs[0]}{', ...' if len(configs) > 1 else ''})" if configs else ""
    return f"Saved in {folder}: {', '.join([*tables, *([named] if named else [])])}"


def _gain(row: CapacityRow) -> str:
    if row.is_given or row.best is None:
        return ""
    if row.baseline is None or row.speedup is None:
        return "No even split fits there, at any number of accumulation steps."
    even = f"{rate_of(row.baseline)} samples/s as {shape_of(row.baseline.split)}"
    if row.speedup < LEAST_SPEEDUP:
        return f"The even split that people use is as fast: {even} (modelled)."
    return f"That is {row.speedup:.2f}x the even split that people use: {even} (modelled)."


def _cells(row: CapacityRow) -> tuple[str, ...]:
    run, even, largest = row.best, row.baseline, row.largest
    named = (row.devices, row.strategy, str(row.global_batch_size))
    limit = NOTHING if largest is None else f"{'' if largest.is_measured else '>= '}{largest.num_samples:,}"
    if run is None or not row.fits:
        split = "does not fit" if run is None else f"{shape_of(run.split)} does not fit"
        return (*named, split, *[NOTHING] * 5, limit)
    return (
        *named,
        shape_of(run.split),
        rate_of(run),
        NOTHING if run.step_time_s is None else format_time(run.step_time_s),
        _fullest(row),
        NOTHING if row.is_given else "does not fit" if even is None else f"{rate_of(even)}, {_steps_of(even.split)}",
        NOTHING if row.speedup is None else f"{row.speedup:.2f}x",
        limit,
    )


def _steps_of(split: object) -> str:
    return count_of(getattr(split, "accumulation_steps", 0), "step")


def _fullest(row: CapacityRow) -> str:
    """``"GPU 0: 21.90 GiB of 24.00 GiB"``: held at its peak by all, of the card with the least headroom."""
    device = row.limiting_device
    if device is None or row.best is None:
        return NOTHING
    memory = row.best.memory[device]
    held = memory.outside_bytes + memory.peak_reserved_bytes
    return f"GPU {device}: {format_bytes(held)} of {format_bytes(memory.total_bytes)}"


def _listed(rows: Sequence[CapacityRow]) -> str:
    return ", ".join(dict.fromkeys(row.devices for row in rows))
