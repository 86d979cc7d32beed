"""What the models say of every candidate, and the acquisition functions that rank them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr  # of scipy.stats, which takes half a second to import, nothing else is needed

from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.candidates.table import SplitTable
from splittune.search.models.memory import Interval
from splittune.search.models.step_time import StepTimes

# Partial feasibility never reads as certain: a choice, any number just below 1 does.
ALMOST_SURE = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScores:
    """What the models say of each split in `table`."""

    table: SplitTable
    times: StepTimes
    best_log_s: float
    """Predicted for the fastest split that fits; infinite where none does."""
    gain: FloatArray
    """(N,) expected improvement over that split, in logarithms of time: 0.01 is 1 %."""
    needed: Interval
    limits: FloatArray
    """(n,) the bytes each device may hold and keep its headroom."""
    feasibility: FloatArray
    """(N,) how likely every device keeps its headroom, see `joint_feasibility`."""
    cannot_oom: BoolArray
    """(N,) cannot run out of memory, though it may keep too little headroom."""

    @property
    def surely_feasible(self) -> BoolArray:
        """(N,) cannot run out of memory, and keeps its headroom."""
        return np.asarray(self.cannot_oom & (self.feasibility == 1))

    @property
    def value(self) -> FloatArray:
        """(N,) constrained expected improvement: gain x feasibility, 0 unless `cannot_oom`."""
        return np.asarray(self.gain * np.where(self.cannot_oom, self.feasibility, 0.0))

    @property
    def best_row(self) -> int:
        """The row with the most `value`."""
        return int(self.value.argmax())


def expected_improvement(gains: FloatArray, deviations: FloatArray) -> FloatArray:
    """(N,) mean of ``max(0, gain)`` where gains are normal with these means and deviations."""
    deviations = np.maximum(deviations, 1e-9)
    scaled = gains / deviations
    density = np.exp(-(scaled**2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(gains * ndtr(scaled) + deviations * density)


def optimistic_gain(scores: CandidateScores, deviations: float) -> FloatArray:
    """(N,) upper confidence bound: the gain if a split is so many deviations faster than predicted.

    In logarithms of time.
    """
    return np.asarray(scores.best_log_s - scores.times.log_s + deviations * scores.times.deviation)


def joint_feasibility(needed: Interval, limits: FloatArray) -> FloatArray:
    """(N,) the part of the interval within the limits, on the device where that is least.

    It is 1 only where all of the interval is. Example: 8 to 12 GiB has 0.5 below 10 GiB.
    """
    width = np.maximum(needed.most - needed.least, 1.0)
    within = np.clip((limits - needed.least) / width, 0.0, 1.0).min(axis=1)
    return np.asarray(np.where((needed.most <= limits).all(axis=1), 1.0, np.minimum(within, ALMOST_SURE)))
