"""One card's time for a share of the micro-batch: a launch floor and a line, bent or stepped where measurements say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]

# A knee must explain this much of what a straight line leaves, or there is none.
KNEE_GAIN = 0.5
SINGLE_FLOOR = 0.6
# A curve is drawn through fewer shares than this, whatever the truth is; deviations below this are nothing.
WELL_KNOWN, LEAST_DEVIATION = 4, 0.002
# How far off a curve is believed to be at a share e times as large as any measured, by how many were (of one share alone
# nobody knows what is floor and what slope), and between two that were.
DOUBT_BEYOND, DOUBT_BETWEEN = (0.45, 0.12, 0.06), 0.12


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for a share: ``floor + slope x max(share, knee) + tile_s x filled``, times what measured shares deviate from it.

    Kernels work on tiles of so many samples and are paid for whole ones: `filled` is the share, up to full tiles.

    Between two measured shares the deviation is interpolated, so tiles, algorithm switches and whatever else breaks
    the form are followed where they were seen. Worked: a floor of 2 ms, a slope of 1 ms and a knee of 4 samples take
    6 ms for 1 to 4 samples and 10 ms for 8; with 1 ms a sample for tiles of 8, 14 ms and 18 ms.
    """

    floor_s: float
    slope_s: float
    knee: float
    shares: Floats
    deviations: Floats
    """Logarithms of measured over the form, at `shares`."""
    ratio: float = 1.0
    """Of every share it is asked for, so that one curve serves cards of several speeds."""
    tile: int = 1
    tile_s: float = 0.0

    def __call__(self, shares: Floats) -> Floats:
        """Seconds for each share; 0 for a share of 0."""
        scaled = shares * self.ratio
        form = self.floor_s + self.slope_s * np.maximum(scaled, self.knee) + self.tile_s * _filled(scaled, self.tile)
        return np.where(shares > 0, form * np.exp(self.deviation(shares)), 0.0)

    def deviation(self, shares: Floats) -> Floats:
        """Logarithm of the curve over its form."""
        return np.asarray(np.interp(np.log1p(shares * self.ratio), np.log1p(self.shares), self.deviations))

    def is_well_known(self, noise: float) -> bool:
        """Whether more shares were measured than it takes to draw it, and noise explains what they deviate."""
        return len(self.shares) >= WELL_KNOWN and float(np.abs(self.deviations).max()) <= max(noise, LEAST_DEVIATION)

    def distance(self, shares: Floats) -> Floats:
        """From the nearest measured share, as a difference of logarithms."""
        away = np.log1p(shares * self.ratio)[:, None] - np.log1p(self.shares)[None, :]
        return np.asarray(np.abs(away).min(axis=1))

    def doubt(self, shares: Floats) -> Floats:
        """Relative standard deviation away from the measured shares: it grows with the distance in logarithms."""
        nearest = self.distance(shares)
        shares = shares * self.ratio
        beyond = DOUBT_BEYOND[min(len(self.shares), len(DOUBT_BEYOND)) - 1]
        outside = (shares > self.shares.max()) | (shares < self.shares.min())
        return np.asarray(np.where(outside, beyond, DOUBT_BETWEEN) * nearest)


def fit_curve(
    shares: Sequence[float] | Floats, times_s: Sequence[float] | Floats, noise: float, tile: int = 1
) -> Curve | None:
    """The curve through measured (share, seconds) pairs, whose relative noise is given; None without any.

    Coefficients are not negative, and relative errors are squared: small shares count as much as large ones. A single
    share tells nothing of the floor, which then gets `SINGLE_FLOOR` of its time. With a `tile` above 1 the curve has
    steps of that width in place of a knee, where they explain anything; else it is the one without.
    """
    if not len(shares):
        return None
    sizes, inverse = np.unique(np.asarray(shares, dtype=float), return_inverse=True)
    measured = np.exp(np.array([np.log(np.asarray(times_s)[inverse == i]).mean() for i in range(len(sizes))]))
    if len(sizes) == 1:
        floor = SINGLE_FLOOR * measured[0]
        return Curve(floor, (measured[0] - floor) / sizes[0], 0.0, sizes, np.zeros(1))
    if tile > 1:
        floor, slope, tile_s = _coefficients(measured, sizes, _filled(sizes, tile))
        if tile_s > 0:
            form = floor + slope * sizes + tile_s * _filled(sizes, tile)
            left = _left_of(measured, form, noise)
            return Curve(float(floor), float(slope), 0.0, sizes, left, tile=tile, tile_s=float(tile_s))
    knees = np.concatenate([[0.0], _knees(measured, sizes)])
    floors, slopes, errors = _lines(measured, np.maximum(sizes, knees[:, None]))
    straight, best = errors[0], int(np.flatnonzero(errors <= errors.min() + 1e-12)[-1])
    if errors[best] >= KNEE_GAIN * straight or straight <= len(sizes) * noise**2:
        best = 0
    form = floors[best] + slopes[best] * np.maximum(sizes, knees[best])
    left = _left_of(measured, form, noise)
    return Curve(float(floors[best]), float(slopes[best]), float(knees[best]), sizes, left)


def _filled(shares: Floats, tile: int) -> Floats:
    return np.asarray(np.ceil(shares / tile) * tile)


def _left_of(measured: Floats, form: Floats, noise: float) -> Floats:
    """Logarithms of measured over the form; what noise explains is not followed."""
    deviations = np.log(measured / form)
    spread = float((deviations**2).mean())
    return np.asarray(deviations * (spread / (spread + noise**2) if spread > 0 else 0.0))


def _knees(measured: Floats, sizes: Floats) -> Floats:
    """Where a knee may be: at a size, half way between two, or where the line through the sizes above meets the flat below."""
    if len(sizes) < 3:
        return np.zeros(0)
    splits = np.arange(1, len(sizes) - 1)
    above = np.arange(len(sizes)) >= splits[:, None]
    floors, slopes, _ = _lines(measured, np.tile(sizes, (len(splits), 1)), above)
    flats = np.cumsum(1 / measured)[splits - 1] / np.cumsum(1 / measured**2)[splits - 1]  # of the least relative error
    met = (flats - floors) / slopes
    met = met[(sizes[splits - 1] < met) & (met < sizes[splits])]
    return np.unique(np.concatenate([sizes[1:-1], np.sqrt(sizes[:-1] * sizes[1:]), met]))


def _lines(measured: Floats, terms: Floats, counted: NDArray[np.bool_] | bool = True) -> tuple[Floats, Floats, Floats]:
    """(K,) floors, slopes and squared relative errors of K lines ``floor + slope x term`` through R times each.

    No coefficient is negative: where the best line has one that is, the best with a 0 in its place is the best.
    `terms` is (K, R), and so is `counted`, which of the times count.
    """
    ones = np.where(counted, 1 / measured, 0.0) * np.ones_like(terms)
    scaled = terms * ones
    target = np.where(counted, 1.0, 0.0) * np.ones_like(terms)
    aa, ab, bb = (ones**2).sum(axis=1), (ones * scaled).sum(axis=1), (scaled**2).sum(axis=1)
    a, b = ones.sum(axis=1), scaled.sum(axis=1)
    determinant = np.maximum(aa * bb - ab**2, 1e-12 * aa * bb)
    floors, slopes = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    floors, slopes = np.where(slopes < 0, a / aa, floors), np.where(floors < 0, b / bb, slopes)
    floors, slopes = np.maximum(floors, 0.0), np.maximum(slopes, 1e-15)
    errors = ((floors[:, None] * ones + slopes[:, None] * scaled - target) ** 2).sum(axis=1)
    return floors, slopes, errors


def _coefficients(times_s: Floats, *terms: Floats) -> Floats:
    """Of a floor and each of the terms."""
    matrix = np.column_stack([np.ones_like(times_s), *terms]) / times_s[:, None]
    solution, _ = nnls(matrix, np.ones_like(times_s))
    return np.maximum(solution, [0.0, 1e-15, *[0.0] * (len(terms) - 1)])
