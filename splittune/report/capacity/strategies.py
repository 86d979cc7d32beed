"""Two strategies on the same cards and batch: which is faster and why, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from splittune.report.words import count_of
from splittune.units import format_time

if TYPE_CHECKING:
    from splittune.profiling.measurement import Measurement
    from splittune.report.capacity.row import CapacityRow

# Steps that differ by less are called as fast: half of what the console shows. A choice.
LEAST_GAIN = 1.005


def compared(rows: Sequence[CapacityRow]) -> tuple[str, ...]:
    """A sentence for each machine and batch size that was planned both ways, which is faster and why.

    Worked: one process in 4 steps and ranks in 2 give ``'4xT4, batch 64: "ddp" is 1.31 times as fast as "dp"
    (modelled): it has room for ... in 2 steps, where ...'``.
    """
    return tuple(_compare(*pair) for pair in _pairs(rows))


def _pairs(rows: Sequence[CapacityRow]) -> Iterator[tuple[CapacityRow, CapacityRow]]:
    ranks = {(row.devices, row.global_batch_size): row for row in rows if row.strategy == "ddp" and not row.is_given}
    for row in rows:
        other = ranks.get((row.devices, row.global_batch_size))
        if row.strategy == "dp" and not row.is_given and other is not None:
            yield row, other


def _compare(process: CapacityRow, ranks: CapacityRow) -> str:
    where = f"{process.devices}, batch {process.global_batch_size}:"
    if not process.fits or not ranks.fits or process.best is None or ranks.best is None:
        if process.fits == ranks.fits:
            return f'{where} neither "dp" nor "ddp" fits.'
        one, other = ("dp", "ddp") if process.fits else ("ddp", "dp")
        return f'{where} only "{one}" fits (modelled). {_lack_of(other)}'
    gain = (ranks.best.throughput or 0.0) / (process.best.throughput or 1.0)
    if max(gain, 1 / gain) < LEAST_GAIN:
        return f'{where} "dp" and "ddp" are as fast (modelled).'
    one, other = ("ddp", "dp") if gain > 1 else ("dp", "ddp")
    faster = f'{where} "{one}" is {max(gain, 1 / gain):.2f} times as fast as "{other}" (modelled)'
    loser = process if gain > 1 else ranks
    return f"{faster}: {_reason(process.best, ranks.best, ranks_win=gain > 1, lacks_memory=loser.needs_splitting)}"


def _lack_of(strategy: str) -> str:
    if strategy == "dp":
        return "In one process GPU 0 holds the optimizer's state, every card's outputs and the loss beside its share."
    return "Ranks hold gradients, their buckets and the optimizer's state on every card, not on GPU 0 alone."


def _reason(process: Measurement, ranks: Measurement, *, ranks_win: bool, lacks_memory: bool) -> str:
    """What makes most of the difference: the steps that fit, a micro-step, or what comes once a step."""
    steps = process.split.accumulation_steps, ranks.split.accumulation_steps
    if steps[0] > steps[1] and ranks_win and lacks_memory:
        return (
            f"it needs {count_of(steps[1], 'accumulation step')}, not {steps[0]}, for GPU 0 does not hold the "
            "optimizer's state, every card's outputs and the loss beside its share."
        )
    if steps[1] > steps[0] and not ranks_win and lacks_memory:
        return (
            f"it needs {count_of(steps[0], 'accumulation step')}, not {steps[1]}, for only GPU 0 holds gradients and "
            "the optimizer's state, and no card buckets."
        )
    in_micro_steps = [run.split.accumulation_steps * (run.micro_step_time_s or 0.0) for run in (process, ranks)]
    once = [(run.step_time_s or 0.0) - micro_s for run, micro_s in zip((process, ranks), in_micro_steps, strict=True)]
    gains_s = [pair[0] - pair[1] if ranks_win else pair[1] - pair[0] for pair in (in_micro_steps, once)]
    if gains_s[0] >= gains_s[1]:
        micro_steps = f"forward and backward take {_times(in_micro_steps, ranks_win=ranks_win)}"
        if ranks_win:
            return f"{micro_steps}, for each card has a process that launches its kernels, and keeps its own outputs."
        return f"{micro_steps}, for shares are other ones, or other cards are full."
    once_text = f"what comes once a step takes {_times(once, ranks_win=ranks_win)}"
    if ranks_win:
        return f"{once_text}: parameters are not copied out, and gradients are added up beside the backward."
    return f"{once_text}: ranks have what is left over of the all-reduce, and the slowest card's update."


def _times(process_and_ranks: Sequence[float], *, ranks_win: bool) -> str:
    """``"12.0 ms, not 15.0 ms"``, of the faster first."""
    process_s, ranks_s = process_and_ranks
    faster_s, slower_s = (ranks_s, process_s) if ranks_win else (process_s, ranks_s)
    return f"{format_time(faster_s)}, not {format_time(slower_s)}"
