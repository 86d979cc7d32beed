"""Two strategies on the same cards and batch: which is faster and why, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from splittune.report.words import count_of
from splittune.units import format_time

if TYPE_CHECKING:
    from splittune.config.data import Strategy
    from splittune.profiling.measurement import Measurement
    from splittune.report.capacity.row import CapacityRow

# Steps that differ by less are called as fast: half of what the console shows. A choice.
LEAST_GAIN = 1.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How cards are used, and what that gives at its best: what a comparison needs of it."""

    devices: str
    strategy: Strategy
    global_batch_size: int
    is_given: bool = False
    """Whether its split was given, not searched."""
    fits: bool
    accumulation_steps: int = 1
    micro_step_time_s: float | None = None
    step_time_s: float | None = None
    throughput: float | None = None
    needs_splitting: bool = False
    """Whether the whole batch does not fit in one step, evenly spread."""


def compared(rows: Sequence[CapacityRow]) -> tuple[str, ...]:
    """`compared_uses` of a plan's rows."""
    return compared_uses([_use_of(row) for row in rows])


def use_of(
    best: Measurement | None, *, devices: str, strategy: Strategy, fits: bool, needs_splitting: bool, is_given: bool
) -> Use:
    """Of a search's best split; without one nothing fits."""
    return Use(
        devices=devices,
        strategy=strategy,
        global_batch_size=0 if best is None else best.split.global_batch_size,
        is_given=is_given,
        fits=fits and best is not None,
        accumulation_steps=1 if best is None else best.split.accumulation_steps,
        micro_step_time_s=None if best is None else best.micro_step_time_s,
        step_time_s=None if best is None else best.step_time_s,
        throughput=None if best is None else best.throughput,
        needs_splitting=needs_splitting,
    )


def compared_uses(uses: Sequence[Use]) -> tuple[str, ...]:
    """A sentence for each machine and batch size that was planned both ways, which is faster and why.

    Worked: one process in 4 steps and ranks in 2 give ``'4xT4, batch 64: "ddp" is 1.31 times as fast as "dp"
    (modelled): it has room for ... in 2 steps, where ...'``.
    """
    return tuple(
        f"{process.devices}, batch {process.global_batch_size}: {compare(process, ranks)}"
        for process, ranks in _pairs(uses)
    )


def _use_of(row: CapacityRow) -> Use:
    use = use_of(
        row.best,
        devices=row.devices,
        strategy=row.strategy,
        fits=row.fits,
        needs_splitting=row.needs_splitting,
        is_given=row.is_given,
    )
    return replace(use, global_batch_size=row.global_batch_size)


def _pairs(uses: Sequence[Use]) -> Iterator[tuple[Use, Use]]:
    ranks = {(use.devices, use.global_batch_size): use for use in uses if use.strategy == "ddp" and not use.is_given}
    for use in uses:
        other = ranks.get((use.devices, use.global_batch_size))
        if use.strategy == "dp" and not use.is_given and other is not None:
            yield use, other


def compare(process: Use, ranks: Use) -> str:
    """Which of "dp" and "ddp" is faster on the same cards and batch, and why, in a sentence."""
    if not process.fits or not ranks.fits:
        if process.fits == ranks.fits:
            return 'neither "dp" nor "ddp" fits.'
        one, other = ("dp", "ddp") if process.fits else ("ddp", "dp")
        return f'only "{one}" fits (modelled). {_lack_of(other)}'
    gain = (ranks.throughput or 0.0) / (process.throughput or 1.0)
    if max(gain, 1 / gain) < LEAST_GAIN:
        return '"dp" and "ddp" are as fast (modelled).'
    one, other = ("ddp", "dp") if gain > 1 else ("dp", "ddp")
    faster = f'"{one}" is {max(gain, 1 / gain):.2f} times as fast as "{other}" (modelled)'
    loser = process if gain > 1 else ranks
    return f"{faster}: {_reason(process, ranks, ranks_win=gain > 1, lacks_memory=loser.needs_splitting)}"


def _lack_of(strategy: str) -> str:
    if strategy == "dp":
        return "In one process GPU 0 holds the optimizer's state, every card's outputs and the loss beside its share."
    return "Ranks hold gradients, their buckets and the optimizer's state on every card, not on GPU 0 alone."


def _reason(process: Use, ranks: Use, *, ranks_win: bool, lacks_memory: bool) -> str:
    """What makes most of the difference: the steps that fit, a micro-step, or what comes once a step."""
    steps = process.accumulation_steps, ranks.accumulation_steps
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
    in_micro_steps = [run.accumulation_steps * (run.micro_step_time_s or 0.0) for run in (process, ranks)]
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
