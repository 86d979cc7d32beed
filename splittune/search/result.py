"""What a search hands back: plain, frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from splittune.profiling.measurement import Measurement

Kind = Literal["search", "confirm"]
Stopped = Literal["converged", "models disagree", "max_trials", "timeout", "space exhausted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measured split.

    Two runs of the same search are equal trial by trial: what the wall clock or an interruption
    decides (`elapsed_s`, `is_resumed`) does not take part in comparisons.
    """

    number: int
    """Its place among the trials of this search, from 0; confirmations follow the searched ones."""
    kind: Kind
    measurement: Measurement
    """Judged by the headroom demanded."""
    reason: str
    """Why this split was chosen, for people."""
    elapsed_s: float | None = field(default=None, compare=False)
    """Seconds the measuring took, by the clock of the run that did it."""
    is_resumed: bool = field(default=False, compare=False)
    """True where it was read back from the storage instead of measured in this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The winner, what it is compared with, and everything measured on the way.

    `best` and `baseline` are confirmations: measured once more after the search, alike and in a
    row. `best` is the fastest of the confirmed splits, so it is never slower than `baseline`.
    """

    best: Measurement
    baseline: Measurement | None
    """The even split at the fewest accumulation steps that fitted; None where no even split did."""
    trials: tuple[Trial, ...]
    stopped: Stopped
    """Why the search ended. "converged": no other split is expected to be faster, by models that
    agreed with the trials. "models disagree": the same, but the latest trials were not as foretold.
    "space exhausted": every split is measured or ruled out by a failure."""
    warnings: tuple[str, ...] = ()
    """What the models of memory and time could not explain, in sentences; empty where they
    fitted."""

    @property
    def speedup(self) -> float | None:
        """Best over baseline in samples/s, at least 1; None without a baseline."""
        return speedup_over(self.baseline, self.best)


def speedup_over(baseline: Measurement | None, best: Measurement) -> float | None:
    """`best` over `baseline` in samples/s: 300 over 240 is 1.25; None where either is unknown."""
    if baseline is None or baseline.throughput is None or best.throughput is None:
        return None
    return best.throughput / baseline.throughput
