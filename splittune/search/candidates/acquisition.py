"""What the models say of every candidate, and how much each may gain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.candidates.table import SplitTable
from splittune.search.models.memory import Interval
from splittune.search.models.step_time import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScores:
    """What the models say of each split in `table`."""

    table: SplitTable
    times: StepTimes
    best_log_s: float
    """Predicted for the fastest split that fits; infinite where none does."""
    needed: Interval
    limits: FloatArray
    """(n,) the bytes each device may hold and keep its headroom."""
    cannot_oom: BoolArray
    """(N,) cannot run out of memory, though it may keep too little headroom."""
    runs: FloatArray
    """(N,) probability not to run out of memory."""

    @property
    def surely_feasible(self) -> BoolArray:
        """(N,) cannot run out of memory, and keeps its headroom."""
        return np.asarray(self.cannot_oom & (self.needed.most <= self.limits).all(axis=1))

    def optimistic_gain(self, deviations: FloatArray) -> FloatArray:
        """(N,) upper confidence bound: the gain if each split is so many `deviations`, (N,), faster than predicted.

        In logarithms of time: 0.01 is 1 %.
        """
        return np.asarray(self.best_log_s - self.times.log_s + deviations * self.times.deviation)
