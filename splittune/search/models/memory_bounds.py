"""What readings of one group of devices demand of its memory coefficients, as rows of `Bounds`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.models.memory_readings import (
    ACCUMULATES,
    CONSTANT,
    MICRO_BATCH,
    REPEATABILITY,
    RESTING_FRACTION,
    SHARE,
    Reading,
)
from splittune.search.models.polytope import Bounds, ConstraintRows

# A peak this many times `REPEATABILITY` above the smallest of its kind is on a slope, not on the
# flat where another phase peaks. Two readings of one flat differ by two tolerances at most.
ON_SLOPE_TOLERANCES = 2
# Least slack in bytes of a row, so that it can give way where it must: a byte is nothing.
LEAST_SLACK_BYTES = 1.0
# Least slack in bytes for each unit of a coefficient, for the same reason.
LEAST_COEFFICIENT_SLACK = 1e-6


def coefficient_bounds(
    readings: Sequence[Reading],
    at_least: Sequence[tuple[FloatArray, float]],
    *,
    reached: BoolArray,
    slope_range: tuple[float, float],
    largest_budget_bytes: float,
) -> Bounds:
    """Bounds on F, beta, gamma and, on GPU 0, omega: see `MemoryModel`.

    Args:
        readings: every peak of forward and backward, at least one.
        at_least: of each trial that failed the row of a device, and live bytes that it reached: all
            that fill it, or what it held when another lacked memory.
        reached: (R,) which peaks the line reaches; it exceeds none.
        slope_range: least and most of beta, bytes for each sample.
        largest_budget_bytes: the end of coefficients that are 0 in every reading.
    """
    constraints = ConstraintRows()
    _add_peaks(constraints, readings, reached)
    _add_rest(constraints, readings)
    for row, live in at_least:
        constraints.add(row[None], least=live * (1 - REPEATABILITY), slack=REPEATABILITY * live)
    _add_ends(constraints, readings, slope_range, largest_budget_bytes)
    return constraints.bounds()


def are_on_slope(readings: Sequence[Reading]) -> BoolArray:
    """(R,) which peaks lie above the flat of the smallest of their kind, single steps or accumulating ones.

    One far above what is held at rest does by itself: parameters rest, and their gradients are as large.
    """
    rows, peaks = _rows_and_peaks(readings)
    accumulates = rows[:, ACCUMULATES]
    flat = np.array([peaks[accumulates == kind].min() for kind in accumulates])
    above = np.array([r.resting_bytes / RESTING_FRACTION if r.resting_bytes else np.inf for r in readings])
    return np.asarray(peaks > np.minimum(flat, above) + ON_SLOPE_TOLERANCES * REPEATABILITY * peaks)


def _add_peaks(constraints: ConstraintRows, readings: Sequence[Reading], reached: BoolArray) -> None:
    """The line exceeds no peak, and it reaches some."""
    rows, peaks = _rows_and_peaks(readings)
    tolerances = REPEATABILITY * peaks
    constraints.add(
        rows,
        least=np.where(reached, peaks - tolerances, -np.inf),
        most=peaks + tolerances,
        slack=np.maximum(tolerances, LEAST_SLACK_BYTES),
    )


def _add_rest(constraints: ConstraintRows, readings: Sequence[Reading]) -> None:
    """Without samples a line is no lower than what is held at rest, nor much above it."""
    rows, peaks = _rows_and_peaks(readings)
    at_rest = np.zeros_like(rows)
    at_rest[:, CONSTANT], at_rest[:, ACCUMULATES] = 1.0, rows[:, ACCUMULATES]
    known = _resting_without_samples(readings)
    least = np.where(np.isnan(known), RESTING_FRACTION * peaks.min(), known * (1 - REPEATABILITY))
    # a guess gives way first, wholly if need be; what was read is a reading like others
    give = np.where(np.isnan(known), 1.0, REPEATABILITY)
    constraints.add(at_rest, least=least, slack=np.maximum(give * least, LEAST_SLACK_BYTES))
    # parameters are at rest, and no batch makes their gradients larger: a guess, too
    read = known > 0
    most = known[read] / RESTING_FRACTION
    constraints.add(at_rest[read], most=most, slack=peaks.max())


def _resting_without_samples(readings: Sequence[Reading]) -> FloatArray:
    """(R,) bytes held at rest, less what grows with the micro-batch; NaN where unknown.

    On GPU 0 the outputs of one micro-batch may be kept until the next has its own. Non-negative least
    squares where sizes differ. Worked: 1,652 bytes before 4 samples and 2,216 before 13 are 62.7 for each,
    and 1,401 without.
    """
    rows = np.array([reading.row for reading in readings])
    known = np.array(
        [np.nan if reading.resting_bytes is None else float(reading.resting_bytes) for reading in readings]
    )
    read = known > 0
    if rows.shape[1] <= MICRO_BATCH or len(np.unique(rows[read, MICRO_BATCH])) < 2:
        return known
    sizes = rows[:, MICRO_BATCH]
    unit = known[read].max()
    (_, _, growth), _ = nnls(np.delete(rows[read], SHARE, axis=1) / [1.0, 1.0, sizes.max()], known[read] / unit)
    return np.where(read, known - unit * growth * sizes / sizes.max(), known)


def _add_ends(
    constraints: ConstraintRows,
    readings: Sequence[Reading],
    slope_range: tuple[float, float],
    largest_budget_bytes: float,
) -> None:
    """No coefficient is more than a whole peak, nor the slope outside its range."""
    rows, peaks = _rows_and_peaks(readings)
    width = rows.shape[1]
    largest = rows.max(axis=0)
    least = np.full(width, -np.inf)
    most = np.where(largest > 0, peaks.max() / np.maximum(largest, 1), largest_budget_bytes)
    least[SHARE], most[SHARE] = slope_range[0], min(most[SHARE], slope_range[1])
    accumulates = rows[:, ACCUMULATES]
    if not accumulates.any() or accumulates.all():
        most[ACCUMULATES] = 0.0  # part of the constant, until trials tell them apart
    slack = np.maximum(REPEATABILITY * most, LEAST_COEFFICIENT_SLACK)
    constraints.add(np.eye(width), least=least, most=most, slack=slack)


def _rows_and_peaks(readings: Sequence[Reading]) -> tuple[FloatArray, FloatArray]:
    """(R, C) rows and (R,) peak bytes."""
    rows = np.array([reading.row for reading in readings])
    return rows, np.array([reading.peak_bytes for reading in readings], dtype=float)
