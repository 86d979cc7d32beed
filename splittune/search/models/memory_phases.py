"""Which phases of a step hold the peaks of one group of devices, each a line in the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.models.memory_bounds import are_on_slope, coefficient_bounds
from splittune.search.models.memory_readings import ACCUMULATES, MICRO_BATCH, REPEATABILITY, SHARE, Reading
from splittune.search.models.polytope import Polytope, agreeing_with

# Two phases are believed if they leave less than this part of a single one's misfit. A choice. Nearer
# to 1, peaks that scatter are taken for two phases.
TWO_PHASES_GAIN = 0.5
# Coefficients agree with readings that give way by no more than their own repeatability.
AGREES = 1.0

Failures = Sequence[tuple[FloatArray, float]]


@dataclass(frozen=True, slots=True)
class Phases:
    """Every peak is the highest of some phases; their coefficients agree with the readings."""

    polytopes: tuple[Polytope, ...]

    @property
    def of_share(self) -> Polytope:
        """The first, which grows with the device's own share."""
        return self.polytopes[0]

    @property
    def misfit(self) -> float:
        """The largest of any phase, see `Polytope`."""
        return max(polytope.misfit for polytope in self.polytopes)

    def lowest(self, rows: FloatArray) -> FloatArray:
        """The least peak for each row."""
        return np.asarray(np.max([polytope.lowest(rows) for polytope in self.polytopes], axis=0))

    def likely(self, rows: FloatArray) -> FloatArray:
        """The peak at the phases' centres, for each row."""
        return np.asarray(np.max([polytope.likely(rows) for polytope in self.polytopes], axis=0))

    def highest(self, rows: FloatArray) -> FloatArray:
        """The most that the peak may be, for each row."""
        return np.asarray(np.max([polytope.highest(rows) for polytope in self.polytopes], axis=0))

    def of_first(self, count: int) -> Phases:
        """With the first `count` coefficients; the others are taken to be 0."""
        return Phases(tuple(polytope.of_first(count) for polytope in self.polytopes))


def fit_phases(
    readings: Sequence[Reading],
    at_least: Failures,
    *,
    slope_range: tuple[float, float],
    largest_budget_bytes: float,
) -> Phases:
    """One phase that reaches all peaks above the flat, or two where no single line agrees with them.

    Of two the steep one reaches the peaks of the largest shares, as many as agree, and exceeds none;
    the slow one reaches what that cannot. Failures were in either. On GPU 0, whose peak may be in a
    phase that no replica has, the steep one may also grow with its share as `slope_range` does not say.
    The first that agrees is taken, else the one that comes nearest. Worked: shares of 2, 4, 8 and 10
    peak at 320, 340, 475 and 555 bytes. A line of 155 and 40 a sample reaches the last two, and one of
    300 and 10 a sample the others.

    Args: as those of `coefficient_bounds`.
    """
    rows = np.array([reading.row for reading in readings])
    peaks = np.array([float(reading.peak_bytes) for reading in readings])
    on_slope, of_share = are_on_slope(readings), are_of_share(readings)
    surely = of_share if of_share.any() else on_slope

    def agreeing(reached: BoolArray, failed: Failures, slopes: tuple[float, float]) -> Polytope:
        bounds = coefficient_bounds(
            readings, failed, reached=reached, slope_range=slopes, largest_budget_bytes=largest_budget_bytes
        )
        return agreeing_with(bounds)

    def two(slopes: tuple[float, float], of_steep: Failures, of_slow: Failures) -> Phases:
        for share in np.unique(rows[surely, SHARE]):
            steep = agreeing(surely & (rows[:, SHARE] >= share), of_steep, slopes)
            if steep.misfit <= AGREES:
                break
        is_beyond = steep.highest(rows) < peaks * (1 - REPEATABILITY)
        slow = agreeing(is_beyond, of_slow, (0.0, float(steep.corners[:, SHARE].max())))
        return Phases((steep, slow))

    best = Phases((agreeing(on_slope, at_least, slope_range),))
    if best.misfit <= AGREES or not surely.any():
        return best
    is_gpu0 = rows.shape[1] > MICRO_BATCH
    for slopes in (slope_range, (0.0, np.inf))[: 2 if is_gpu0 else 1]:
        for failed in ((at_least, ()), ((), at_least))[: 2 if at_least else 1]:
            both = two(slopes, *failed)
            best = both if both.misfit < TWO_PHASES_GAIN * best.misfit else best
            if best.misfit <= AGREES:
                return best
    return best


def are_of_share(readings: Sequence[Reading]) -> BoolArray:
    """(R,) which peaks only the device's own share explains.

    GPU 0 gathers outputs, so its peak may grow with the micro-batch where its share matters little. But
    a reading is of the share if another with a smaller one, though no smaller a micro-batch and no
    less that accumulates, had a smaller peak.
    """
    rows = np.array([reading.row for reading in readings])
    peaks = np.array([float(reading.peak_bytes) for reading in readings])
    no_less = (rows[:, ACCUMULATES:] >= rows[:, None, ACCUMULATES:]).all(axis=2)
    has_less = peaks < peaks[:, None] * (1 - 2 * REPEATABILITY)
    return np.asarray(((rows[:, SHARE] < rows[:, None, SHARE]) & no_less & has_less).any(axis=1))
