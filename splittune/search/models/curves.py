"""A device's seconds for its share of the micro-batch: a launch floor and a line, knee or steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from splittune.search.arrays import FloatArray
from splittune.search.choices import BELIEVED, LEAST_NOISE, SIGNIFICANT
from splittune.search.models.least_squares import non_negative

# Of a single measured share, this part of the time is taken for the launch floor: one point cannot
# tell floor from slope. A choice. Higher, and larger shares look cheaper than they are.
SINGLE_FLOOR = 0.6
# Deviations from the form up to this count as none where the clock has less noise.
LEAST_DEVIATION = SIGNIFICANT * LEAST_NOISE
# Relative standard deviation of a prediction at a share e times the only measured one, or 1/e of it:
# of one share nobody knows what is floor and what is slope. A choice. Higher, and larger shares are
# tried for what they may gain.
DOUBT_OF_ONE_SHARE = 0.45
# Of the work no more than this is held to be in tiles: with all of it two shares that fill the same tiles would be the
# same work, and times of theirs that differ would speak against no tile.
MOST_IN_TILES = 0.999
# The first sample is no more than this much more work than each of very many. A choice: it bounds what is foretold far
# beyond what was measured.
MOST_EXTRA = 3.0
# Seconds a sample costs at least: a curve that is exactly flat would divide by 0.
LEAST_SLOPE_S = 1e-15
# Two sums of squared errors closer than this are equal: of equal fits the largest knee is taken.
EQUAL_ERRORS = 1e-12
# A line with a knee has so many numbers: floor, slope and knee.
KNEE_TERMS = 3
# Two terms whose fit has a smaller determinant than this part of its diagonal product are one term.
SINGULAR = 1e-12


@dataclass(frozen=True, slots=True)
class Work:
    """How much work a share is, in samples.

    Kernels work on tiles of so many samples, which cost as much as full ones. Any share keeps a device from its best
    rate for as long as `half_rate` samples take. And each of few samples is more work than each of many.
    """

    tile: int = 1
    tiled: float = 0.0
    """Of the work, what is in tiles: 0 to 1."""
    half_rate: float = 0.0
    """With so many samples a device has half of its best rate: each share is that much more work. It is the n_1/2 of
    Hockney and Jesshope, "Parallel Computers", 1981."""
    extra: float = 0.0
    """How much more work the first sample is than each of very many."""
    fades: float = 1.0
    """What the first samples are more comes to `extra * fades` in all, and to half of that with so many samples."""

    @classmethod
    def in_tiles(cls, size: int, shares: FloatArray, times_s: FloatArray) -> Work:
        """In tiles of this size, with the part that explains best what shares took; plain where none does.

        A single share, or tiles of 1, tell nothing.
        """
        if size == 1 or np.ptp(shares) == 0:
            return cls()
        plain, tiled = _slopes(shares, cls(size, 1.0).of(shares), times_s)
        return cls(size, min(tiled / (plain + tiled), MOST_IN_TILES)) if tiled > 0 else cls()

    @classmethod
    def fading(cls, fades: float, shares: FloatArray, times_s: FloatArray) -> Work:
        """With what the first samples are more work, by what shares took; plain where three shares do not tell."""
        if len(np.unique(shares)) < 3:
            return cls()
        plain, extra = _slopes(shares, cls(extra=1.0, fades=fades).of(shares) - shares, times_s)
        return cls(extra=extra / max(plain, extra / MOST_EXTRA), fades=fades) if extra > 0 else cls()

    def of(self, shares: FloatArray) -> FloatArray:
        """The work, in samples: shares, with a part rounded up to full tiles, and what the first ones are more.

        Worked: with half of the work in tiles of 8, a share of 9 is as much as 12.5 samples. With a half rate of 4, one
        of 2 is as much as 6, and one of 20 as much as 24: ten times the samples take four times as long. If the first
        samples are up to twice as much work, half of it gone with 4, then a share of 4 is as much as
        ``4 + 4 x 4 / (4 + 4) = 6``, and one of 12 as much as 15.
        """
        filled = shares + self.tiled * (np.ceil(shares / self.tile) * self.tile - shares)
        filled = filled + self.extra * self.fades * shares / (self.fades + shares)
        return np.where(shares > 0, filled + self.half_rate, 0.0)


PLAIN = Work()


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for a share: ``floor + slope x max(work, knee)``, corrected.

    Work is the share, `Work.of`, in samples of a device of ratio 1. The line is called the
    form here. The correction is the deviation of what was measured from the form, interpolated in
    between. So algorithm switches, and whatever else breaks the form, are followed where they were
    measured.

    Worked: a floor of 2 ms, a slope of 1 ms and a knee of 4 take 6 ms for 1 to 4 samples and 10 ms
    for 8. A device of ratio 2 takes 10 ms for 4 samples, and with tiles of 4 for 1 to 4 of them.
    """

    floor_s: float
    slope_s: float
    knee: float
    works: FloatArray
    """What was measured, smallest first."""
    deviations: FloatArray
    """Logarithms of measured over form, at these `works`."""
    ratio: float | FloatArray = 1.0
    """Samples of a device of ratio 1 that take as long as one, so that one curve serves devices of several speeds. Or
    one for each of the last axis of the shares that are asked for."""
    work: Work = PLAIN

    def __call__(self, shares: FloatArray) -> FloatArray:
        """Seconds for each share; 0 for a share of 0."""
        form = self.floor_s + self.slope_s * np.maximum(self._scaled(shares), self.knee)
        return np.where(shares > 0, form * np.exp(self.deviation(shares)), 0.0)

    def at(self, ratios: Sequence[float] | FloatArray) -> Curve:
        """The same for devices of these ratios, (R,), one for each of the last axis of shares."""
        return replace(self, ratio=np.asarray(ratios))

    def deviation(self, shares: FloatArray) -> FloatArray:
        """Logarithm of curve over form, interpolated at `shares`."""
        return np.asarray(np.interp(np.log1p(self._scaled(shares)), np.log1p(self.works), self.deviations))

    def has_form(self, noise: float) -> bool:
        """Whether all that was measured lies on the form, up to noise.

        Three works lie on some line with a knee in any case, which says nothing for it.
        """
        is_told = not self.knee or len(self.works) > KNEE_TERMS
        return is_told and float(np.abs(self.deviations).max()) <= max(noise, LEAST_DEVIATION)

    def doubt(self, shares: FloatArray) -> FloatArray:
        """Relative standard deviation of each prediction.

        Between two works whose deviations d and e differ, kernels likely change at one place, and nothing tells where.
        A part p of the way from d the deviation is e with a probability of p: on average it is what is interpolated,
        give or take ``|e - d| sqrt(p (1 - p))``. Worked: half way from 0.08 to 0 it is 0.04, give or take 0.04.
        Where a single work was measured it grows with the difference of logarithms.

        Two works lie on a line in any case, and on one with a knee: in between may be as little as the lesser takes, or
        the larger in proportion, so half of that is in doubt. Worked: 6 ms for 1 sample and 8 for 13 are a line on
        which 7 take 7 ms, or 6 before a knee: give or take ``log(7 / 6) / 2 = 0.08``.
        """
        at, logs = np.log1p(self._scaled(shares)), np.log1p(self.works)
        if len(logs) == 1:
            return np.asarray(DOUBT_OF_ONE_SHARE * np.abs(at - logs[0]))
        place = np.interp(at, logs, np.arange(len(logs)))
        before = np.minimum(place.astype(int), len(logs) - 2)
        part = place - before
        changed = np.abs(np.diff(self.deviations))[before] * np.sqrt(part * (1 - part))
        return np.asarray(changed if len(logs) > 2 else np.maximum(changed, self._doubt_of_knee(shares)))

    def _doubt_of_knee(self, shares: FloatArray) -> FloatArray:
        """Of a line through two works, see `doubt`."""
        work, (few, many) = self._scaled(shares), self.works
        line_s = self.floor_s + self.slope_s * work
        least_s = np.maximum(self.floor_s + self.slope_s * few, (self.floor_s / many + self.slope_s) * work)
        return np.where((few < work) & (work < many), np.log(np.maximum(line_s / least_s, 1.0)) / 2, 0.0)

    def beyond(self, shares: FloatArray) -> FloatArray:
        """Logarithm of each share's work over the most that was measured; 0 for what is no more."""
        return np.asarray(np.maximum(np.log1p(self._scaled(shares)) - np.log1p(self.works[-1]), 0.0))

    def _scaled(self, shares: FloatArray) -> FloatArray:
        return self.work.of(shares) * self.ratio


def fit_curve(works: Sequence[float] | FloatArray, times_s: Sequence[float] | FloatArray, noise: float) -> Curve:
    """The curve of ratio 1 through measured (work, seconds) pairs, one at least.

    The straight line, or the line with the best knee where that explains what noise does not. No
    coefficient is negative. Least squares on relative errors: small works count as much as large
    ones. A single work gives the floor `SINGLE_FLOOR` of its time.

    Args:
        works: full tiles times the ratio, one for each time.
        times_s: seconds, all above 0.
        noise: relative standard deviation of the times.
    """
    sizes, inverse = np.unique(np.asarray(works, dtype=float), return_inverse=True)
    measured = np.exp(np.bincount(inverse, np.log(times_s)) / np.bincount(inverse))
    if len(sizes) == 1:
        floor = SINGLE_FLOOR * measured[0]
        return Curve(floor, (measured[0] - floor) / sizes[0], 0.0, sizes, np.zeros(1))
    knees = np.concatenate([[0.0], _knees(measured, sizes)])
    floors, slopes, errors = _lines(measured, np.maximum(sizes, knees[:, None]))
    straight, best = errors[0], int(np.flatnonzero(errors <= errors.min() + EQUAL_ERRORS)[-1])
    if errors[best] >= BELIEVED * straight or straight <= len(sizes) * noise**2:
        best = 0
    form = floors[best] + slopes[best] * np.maximum(sizes, knees[best])
    deviations = _deviations(measured, form, noise)
    return Curve(float(floors[best]), float(slopes[best]), float(knees[best]), sizes, deviations)


def _slopes(shares: FloatArray, others: FloatArray, times_s: FloatArray) -> tuple[float, float]:
    """Seconds of each of `shares` and of `others`, beside a constant: non-negative, of least relative error."""
    matrix = np.column_stack([np.ones_like(shares), shares, others]) / times_s[:, None]
    _, own_s, other_s = non_negative(matrix, np.ones_like(shares))
    return float(own_s), float(other_s)


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
    return np.sort(np.concatenate([sizes[1:-1], np.sqrt(sizes[:-1] * sizes[1:]), met]))


def _lines(
    measured: FloatArray, terms: FloatArray, counted: NDArray[np.bool_] | float = 1.0
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(K,) floors, slopes and squared relative errors of K lines ``floor + slope x term``.

    Each line goes through R times. No coefficient is negative: where least squares gives one that
    is, the best line with a 0 in its place is the answer. `terms` is (K, R); `counted`, (K, R) or
    one for all, says which times count.
    """
    ones, inverse = counted * np.ones_like(terms), 1 / measured
    counted_terms = ones * terms
    aa, ab, bb = ones @ inverse**2, counted_terms @ inverse**2, (counted_terms * terms) @ inverse**2
    a, b = ones @ inverse, counted_terms @ inverse
    determinant = np.maximum(aa * bb - ab**2, SINGULAR * aa * bb)
    floors, slopes = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    floors, slopes = np.where(slopes < 0, a / aa, floors), np.where(floors < 0, b / bb, slopes)
    floors, slopes = np.maximum(floors, 0.0), np.maximum(slopes, LEAST_SLOPE_S)
    errors = (ones * ((floors[:, None] + slopes[:, None] * terms) * inverse - 1) ** 2).sum(axis=1)
    return floors, slopes, errors
