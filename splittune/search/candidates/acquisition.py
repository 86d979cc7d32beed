"""What the models say of every candidate, and how much each may gain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.candidates.table import SplitTable
from splittune.search.choices import LENGTHSCALE
from splittune.search.models.interval import Interval
from splittune.search.models.step_time import StepTimes

# So much faster than predicted, in logarithms of time, shares e times as large as any measured may be: libraries choose
# their kernels by size, and trials tell of no size beyond. A choice. Larger: more trials of larger shares.
FASTER_BEYOND = 0.15
LEAST_DEVIATION = 1e-9  # a deviation of none is no reason to divide by 0


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

    @property
    def just_beyond(self) -> FloatArray:
        """(N,) `StepTimes.beyond` where it is up to `LENGTHSCALE`, else 0: further, memory may jump as well."""
        return np.where(self.times.beyond <= LENGTHSCALE, self.times.beyond, 0.0)

    def upper_bound(self, deviations: float) -> FloatArray:
        """(N,) upper confidence bound: the gain if each split is so many `deviations` faster than predicted.

        And by `FASTER_BEYOND` where a device has just more than was measured. In logarithms of time: 0.01 is 1 %.
        Worked: what is predicted 5 % slower, give or take 2 %, with 90 samples where 65 were most, may be faster by
        ``2 x 0.02 + 0.15 log(90 / 65) - 0.05 = 0.04``.
        """
        faster = deviations * self.times.deviation + FASTER_BEYOND * self.just_beyond
        return np.asarray(self.best_log_s - self.times.log_s + faster)

    def expected_improvement(self) -> FloatArray:
        """(N,) the `expected_improvement` of each split on the fastest that fits, in logarithms of time."""
        return expected_improvement(self.best_log_s - self.times.log_s, self.times.deviation)


def expected_improvement(gains: FloatArray, deviations: FloatArray) -> FloatArray:
    """(N,) the gain that is to be expected if what is no gain counts as 0.

    Of a normal distribution with mean m and standard deviation s it is ``m Phi(m / s) + s phi(m / s)``: Jones,
    Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box Functions", 1998. Worked: a gain of
    0.05, give or take 0.18, is expected to improve by ``0.05 x 0.609 + 0.18 x 0.384 = 0.0996``.
    """
    deviations = np.maximum(deviations, LEAST_DEVIATION)
    standard = gains / deviations
    density = np.exp(-(standard**2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(gains * ndtr(standard) + deviations * density)
