"""What a tuning problem is to whoever judges a search: splits to measure, and a truth beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from splittune.profiling.measurement import Measurement
from splittune.split import BatchSplit, SplitSpace


class Problem(Protocol):
    """A tuning problem whose best split is known.

    Example: ``find_best_split(problem.space(), problem.measure,
    min_headroom_bytes=problem.min_headroom_bytes)`` searches it, and ``problem.throughput(best) /
    problem.best_throughput`` says how well.
    """

    seed: int
    kind: str
    """What is unusual in it, words with commas between them."""
    min_headroom_bytes: tuple[int, ...]
    """What each card must keep free."""
    measured: list[BatchSplit]
    """Every split that was given to `measure`, in order."""
    num_oom: int
    """How many of these ran out of memory."""

    def space(self) -> SplitSpace:
        """The legal splits."""
        ...

    def measure(self, split: BatchSplit) -> Measurement:
        """A short trial, with noise: 5 micro-steps and 3 updates."""
        ...

    def confirm(self, split: BatchSplit) -> Measurement:
        """A longer trial, with noise: 5 whole steps."""
        ...

    def runs(self, split: BatchSplit) -> bool:
        """Whether no card runs out of memory."""
        ...

    def fits(self, split: BatchSplit) -> bool:
        """Whether every card keeps its headroom."""
        ...

    def throughput(self, split: BatchSplit) -> float:
        """Samples per second without noise, whether or not the split fits."""
        ...

    @property
    def best_throughput(self) -> float | None:
        """Of the fastest split of the space that fits; None where none does."""
        ...


def without_optional_readings(measurement: Measurement) -> Measurement:
    """The same trial as a `measure` would tell it that fills no optional field.

    Times, outcome and the four required figures of each card's memory stay.
    """
    memory = tuple(
        replace(
            card,
            micro_step_peak_bytes=None,
            update_peak_bytes=None,
            single_step_peak_bytes=None,
            resting_bytes=None,
            before_backward_bytes=None,
        )
        for card in measurement.memory
    )
    return replace(measurement, memory=memory, device_busy_s=None, unbroken_round_times_s=(), loss_exponent=None)
