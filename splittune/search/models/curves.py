"""A device's seconds for its share of the micro-batch: a launch floor and a line, knee or steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splittune.search.arrays import FloatArray
from splittune.search.models.least_squares import non_negative

# A knee is believed if it leaves less than this part of the straight line's squared errors. A
# choice. Nearer to 1, noise bends lines; nearer to 0, real knees are missed.
KNEE_GAIN = 0.5
# Of a single measured share, this part of the time is taken for the launch floor: one point cannot
# tell floor from slope. A choice. Higher, and larger shares look cheaper than they are.
SINGLE_FLOOR = 0.6
# A curve is well known from this many shares on: floor, slope and knee are three unknowns, so the
# fourth share is the first that can contradict them. Higher, and tiles are weighed for longer.
WELL_KNOWN = 4
# Deviations from the form up to this count as none where the clock has less noise. A choice, twice
# the noise that is assumed of a modelled clock. Higher, and small steps of a curve go unnoticed.
LEAST_DEVIATION = 0.002
# Relative standard deviation of a prediction at a share e times the only measured one, or 1/e of it:
# of one share nobody knows what is floor and what is slope. A choice. Higher, and larger shares are
# tried for what they may gain.
DOUBT_OF_ONE_SHARE = 0.45
# Seconds a sample costs at least: a curve that is exactly flat would divide by 0.
LEAST_SLOPE_S = 1e-15
# Two sums of squared errors closer than this are equal: of equal fits the largest knee is taken.
EQUAL_ERRORS = 1e-12
# Two terms whose fit has a smaller determinant than this part of its diagonal product are one term.
SINGULAR = 1e-12


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for a share: ``floor + slope x max(share, knee) + tile_s x filled``, corrected.

    Kernels work on tiles of `tile` samples and cost as much as full ones: `filled` is the share
    rounded up to full tiles. The sum is called the form here. The correction is the deviation of
    the measured shares from the form, interpolated between them. So algorithm switches, and
    whatever else breaks the form, are followed where they were measured.

    Worked: a floor of 2 ms, a slope of 1 ms and a knee of 4 samples take 6 ms for 1 to 4 samples
    and 10 ms for 8. With 1 ms a sample for tiles of 8 they take 14 ms and 18 ms.
    """

    floor_s: float
    slope_s: float
    knee: float
    shares: FloatArray
    deviations: FloatArray
    """Logarithms of measured over form, at the measured `shares`."""
    ratio: float = 1.0
    """Shares are multiplied by it first, so that one curve serves devices of several speeds."""
    tile: int = 1
    tile_s: float = 0.0

    def __call__(self, shares: FloatArray) -> FloatArray:
        """Seconds for each share; 0 for a share of 0."""
        scaled = shares * self.ratio
        form = self.floor_s + self.slope_s * np.maximum(scaled, self.knee) + self.tile_s * _filled(scaled, self.tile)
        return np.where(shares > 0, form * np.exp(self.deviation(shares)), 0.0)

    def deviation(self, shares: FloatArray) -> FloatArray:
        """Logarithm of curve over form, interpolated at `shares`."""
        return np.asarray(np.interp(np.log1p(shares * self.ratio), np.log1p(self.shares), self.deviations))

    def is_well_known(self, noise: float) -> bool:
        """Whether `WELL_KNOWN` shares were measured and all lie on the form, up to noise."""
        return len(self.shares) >= WELL_KNOWN and float(np.abs(self.deviations).max()) <= max(noise, LEAST_DEVIATION)

    def doubt(self, shares: FloatArray) -> FloatArray:
        """Relative standard deviation: where a single share was measured it grows with the difference of logarithms."""
        if len(self.shares) > 1:
            return np.zeros_like(shares)
        return np.asarray(DOUBT_OF_ONE_SHARE * np.abs(np.log1p(shares * self.ratio) - np.log1p(self.shares[0])))


def fit_curve(
    shares: Sequence[float] | FloatArray, times_s: Sequence[float] | FloatArray, noise: float, tile: int = 1
) -> Curve | None:
    """The curve through measured (share, seconds) pairs; None without any.

    No coefficient is negative. Least squares on relative errors: small shares count as much as
    large ones. A single share gives the floor `SINGLE_FLOOR` of its time.

    Args:
        shares: samples, one for each time.
        times_s: seconds, all above 0.
        noise: relative standard deviation of the times.
        tile: above 1, the curve has steps of this width in place of a knee. Steps that explain
            nothing are left out.
    """
    if not len(shares):
        return None
    sizes, inverse = np.unique(np.asarray(shares, dtype=float), return_inverse=True)
    measured = np.exp(np.bincount(inverse, np.log(times_s)) / np.bincount(inverse))
    if len(sizes) == 1:
        floor = SINGLE_FLOOR * measured[0]
        return Curve(floor, (measured[0] - floor) / sizes[0], 0.0, sizes, np.zeros(1))
    tiled = _tiled_curve(sizes, measured, noise, tile) if tile > 1 else None
    return tiled or _knee_curve(sizes, measured, noise)


def _tiled_curve(sizes: FloatArray, measured: FloatArray, noise: float, tile: int) -> Curve | None:
    """The curve with steps of `tile` samples; None where the steps explain nothing."""
    floor, slope, tile_s = _coefficients(measured, sizes, _filled(sizes, tile))
    if tile_s <= 0:
        return None
    form = floor + slope * sizes + tile_s * _filled(sizes, tile)
    deviations = _deviations(measured, form, noise)
    return Curve(float(floor), float(slope), 0.0, sizes, deviations, tile=tile, tile_s=float(tile_s))


def _knee_curve(sizes: FloatArray, measured: FloatArray, noise: float) -> Curve:
    """The straight line, or the line with the best knee where that explains what noise does not."""
    knees = np.concatenate([[0.0], _knees(measured, sizes)])
    floors, slopes, errors = _lines(measured, np.maximum(sizes, knees[:, None]))
    straight, best = errors[0], int(np.flatnonzero(errors <= errors.min() + EQUAL_ERRORS)[-1])
    if errors[best] >= KNEE_GAIN * straight or straight <= len(sizes) * noise**2:
        best = 0
    form = floors[best] + slopes[best] * np.maximum(sizes, knees[best])
    deviations = _deviations(measured, form, noise)
    return Curve(float(floors[best]), float(slopes[best]), float(knees[best]), sizes, deviations)


def _filled(shares: FloatArray, tile: int) -> FloatArray:
    """Shares rounded up to full tiles."""
    return np.asarray(np.ceil(shares / tile) * tile)


def _deviations(measured: FloatArray, form: FloatArray, noise: float) -> FloatArray:
    """Logarithms of measured over form, less the part of their variance that noise explains."""
    deviations = np.log(measured / form)
    spread = float((deviations**2).mean())
    return np.asarray(deviations * (spread / (spread + noise**2) if spread > 0 else 0.0))


def _knees(measured: FloatArray, sizes: FloatArray) -> FloatArray:
    """Where a knee may be: at a size, midway between two, or where line and flat meet.

    Midway is in logarithms. The line is fitted to the sizes above, the flat is the best constant
    below.
    """
    if len(sizes) < 3:
        return np.zeros(0)
    splits = np.arange(1, len(sizes) - 1)
    above = np.arange(len(sizes)) >= splits[:, None]
    floors, slopes, _ = _lines(measured, np.tile(sizes, (len(splits), 1)), above)
    flats = np.cumsum(1 / measured)[splits - 1] / np.cumsum(1 / measured**2)[splits - 1]  # of the least relative error
    met = (flats - floors) / slopes
    met = met[(sizes[splits - 1] < met) & (met < sizes[splits])]
    return np.unique(np.concatenate([sizes[1:-1], np.sqrt(sizes[:-1] * sizes[1:]), met]))


def _lines(
    measured: FloatArray, terms: FloatArray, counted: NDArray[np.bool_] | bool = True
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(K,) floors, slopes and squared relative errors of K lines ``floor + slope x term``.

    Each line goes through R times. No coefficient is negative: where least squares gives one that
    is, the best line with a 0 in its place is the answer. `terms` is (K, R); `counted`, (K, R) or
    one for all, says which times count.
    """
    ones = np.where(counted, 1 / measured, 0.0) * np.ones_like(terms)
    scaled = terms * ones
    target = np.where(counted, 1.0, 0.0) * np.ones_like(terms)
    aa, ab, bb = (ones**2).sum(axis=1), (ones * scaled).sum(axis=1), (scaled**2).sum(axis=1)
    a, b = ones.sum(axis=1), scaled.sum(axis=1)
    determinant = np.maximum(aa * bb - ab**2, SINGULAR * aa * bb)
    floors, slopes = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    floors, slopes = np.where(slopes < 0, a / aa, floors), np.where(floors < 0, b / bb, slopes)
    floors, slopes = np.maximum(floors, 0.0), np.maximum(slopes, LEAST_SLOPE_S)
    errors = ((floors[:, None] * ones + slopes[:, None] * scaled - target) ** 2).sum(axis=1)
    return floors, slopes, errors


def _coefficients(times_s: FloatArray, *terms: FloatArray) -> FloatArray:
    """A floor and a coefficient for each term: non-negative least squares on relative errors."""
    matrix = np.column_stack([np.ones_like(times_s), *terms]) / times_s[:, None]
    solution = non_negative(matrix, np.ones_like(times_s))
    return np.maximum(solution, [0.0, LEAST_SLOPE_S, *[0.0] * (len(terms) - 1)])
