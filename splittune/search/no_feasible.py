"""The account of a search that found no split to train with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splittune.errors import NoFeasibleSplitError
from splittune.profiling.measurement import Measurement, Outcome
from splittune.units import format_bytes

if TYPE_CHECKING:
    from splittune.search.result import Stopped, Trial


def no_feasible_split(
    trials: Sequence[Trial], stopped: Stopped, min_headroom_bytes: Sequence[int]
) -> NoFeasibleSplitError:
    """The error for a search without a winner: what was tried, what it lacked, what to do."""
    searched = [trial.measurement for trial in trials if trial.kind == "search"]
    confirmed = [trial.measurement for trial in trials if trial.kind == "confirm"]
    if confirmed:
        return NoFeasibleSplitError(
            f"{_count(len(confirmed), 'split')} fitted in the search, but none fitted again when confirmed. "
            f"{_smallest(confirmed, min_headroom_bytes)} Memory is too scarce to rely on: close other programs on the "
            "devices, or demand more headroom so that the search keeps further away from the limit."
        )
    if searched and all(measurement.outcome is Outcome.CRASHED for measurement in searched):
        return NoFeasibleSplitError(
            f"{_count(len(searched), 'split')} measured, and every one crashed. "
            f"{_smallest(searched, min_headroom_bytes)} This is no lack of memory: run one training step "
            "by hand to see the error."
        )
    tried = _smallest(searched, min_headroom_bytes) if searched else "Nothing was measured."
    if stopped == "space exhausted":
        return NoFeasibleSplitError(
            f"no split fits: {_count(len(searched), 'split')} measured, and these failures rule out every other. "
            f"{tried} Use a smaller model or shorter samples, activation checkpointing, lower precision, or devices "
            "with more free memory."
        )
    limit = f"{_count(len(searched), 'trial')} (max_trials)" if stopped == "max_trials" else "the time (timeout_s)"
    return NoFeasibleSplitError(
        f"no split that fits was found before {limit} ran out: {_count(len(searched), 'split')} measured, others are "
        f"untried. {tried} Allow more {'trials' if stopped == 'max_trials' else 'time'} to try smaller ones."
    )


def _smallest(measurements: Sequence[Measurement], min_headroom_bytes: Sequence[int]) -> str:
    smallest = min(measurements, key=lambda m: (m.split.micro_batch_size, max(m.split.shard_sizes)))
    return f"The smallest tried, {smallest.split}, {_lack(smallest, min_headroom_bytes)}."


def _lack(measurement: Measurement, min_headroom_bytes: Sequence[int]) -> str:
    message = _abridged(measurement.message)
    if measurement.outcome is Outcome.CRASHED:
        return f"crashed: {message or 'without a message'}"
    lacking = measurement.lacks_headroom(min_headroom_bytes)
    if lacking is None:
        said = "ran out of memory" if measurement.outcome is Outcome.OUT_OF_MEMORY else "kept too little headroom"
        return f"{said}: {message}" if message else said
    memory, demand = lacking
    amount = format_bytes(demand - memory.headroom_bytes)
    return f"lacked {amount} on device {memory.device} ({memory.describe_lack(demand)})"


def _abridged(message: str) -> str:
    """The first and the last line: of an error in a replica, where it was and what it was."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1]))).rstrip(".") if lines else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
