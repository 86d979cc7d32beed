"""What was measured, arranged for the questions a sampler asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splittune.search.attempt import Attempt, baseline_attempt, best_attempt, is_hopeless

if TYPE_CHECKING:
    from splittune.search.candidates import Candidates
    from splittune.split import BatchSplit


class View:
    """The attempts so far, seen from the candidates: which are open, which is best."""

    def __init__(self, candidates: Candidates, attempts: Sequence[Attempt]) -> None:
        self.attempts = attempts
        self._candidates = candidates
        self._measured = {attempt.split: attempt for attempt in attempts}
        self._even = frozenset(candidates.even_splits)
        self.best = best_attempt(attempts)
        self.baseline = baseline_attempt(candidates.even_splits, attempts)

    def at(self, steps: int) -> list[Attempt]:
        """The attempts with this many accumulation steps."""
        return [attempt for attempt in self.attempts if attempt.split.accumulation_steps == steps]

    def throughput_at(self, steps: int) -> float:
        """The best samples/s reached in this many steps; 0 where nothing fitted."""
        return max((attempt.throughput for attempt in self.at(steps)), default=0.0)

    def throughput_of(self, split: BatchSplit) -> float:
        """The samples/s of this split; 0 where it was not measured or does not fit."""
        return self._measured[split].throughput if split in self._measured else 0.0

    def is_open(self, split: BatchSplit) -> bool:
        """Neither measured nor ruled out."""
        return split not in self._measured and not is_hopeless(split, self.attempts)

    def is_even(self, split: BatchSplit) -> bool:
        """True for the even split."""
        return split in self._even

    def open_at(self, steps: int, shard_sizes: Sequence[int]) -> int | None:
        """The index of this split, see `Candidates.near`; None where it is no candidate or not open."""
        index = self._candidates.near(steps, shard_sizes)
        return index if index is not None and self.is_open(self._candidates[index]) else None
