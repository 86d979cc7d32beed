"""The least and the most that a peak can be: the highest of unknown lines, seen at a few sizes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from splittune.search.arrays import BoolArray, FloatArray

# Bounds that meet in less than this volume, scaled to units of 1, do not meet in a corner.
LEAST_VOLUME = 1e-9
# A corner may break a bound by this part, for rounding.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """What is known of a peak at R sizes."""

    sizes: FloatArray
    """(R, 2) samples of the device's share, and of the micro-batch where that counts, else 0."""
    num_bytes: FloatArray
    """(R,)"""

    @classmethod
    def of(cls, rows: list[tuple[float, float, float]]) -> Points:
        """Of (share, micro-batch, bytes) for each size."""
        array = np.unique(np.array(rows, dtype=float).reshape(-1, 3), axis=0)
        return cls(sizes=array[:, :2], num_bytes=array[:, 2])


@dataclass(frozen=True, slots=True)
class Envelope:
    """Bounds of ``f(s, m)``, the highest of lines ``F + beta s + omega m`` with no negative coefficient.

    A line is a phase of a step, such as the end of the forward: F is no less than what rests between
    steps, beta what a sample of the device's share takes, omega what one of the micro-batch does.

    - **The most**: the highest line that lies below every point where `f` is known to be no more; no less than `f`
      was at a size that is no larger, and beyond a jump no less than what surely grows on top.
    - **The least**: f is convex and never falls, so a chord to a point where f is no less goes on
      beyond it, and beta is no less than the steepest chord. A chord over a jump does not count: f rose by more than
      in proportion to what was above a rest that is known, or by so much that it is less further on than the chord.

    Worked: 2 at rest, f is 5 at a share of 1 and 8 at 10. A line may rise by 0.6 a sample at most,
    from 2, so at a share of 20 f is 14 at most. It rose by a third from 1 to 10, so it is 11.3 at least.

    Built by `through` of:
        at_most: where f is no more than so many bytes; at least one point.
        at_least: where f is no less.
        rest: no line begins below it.
        least, most: of the largest beta and of the largest omega, as others tell.
        knows_rest: whether `rest` is a reading, so that a rise out of proportion to what is above it was a jump.
    """

    rest: float
    corners: FloatArray
    """(K, 3) the F - rest, beta and omega of the extreme lines."""
    at_most: Points
    at_least: Points
    chords: Points
    """(C, 2) differences of sizes, and the bytes that f rose by at least over each."""
    ends: NDArray[np.int64]
    """(C,) the point of `at_least` where each chord ends."""
    least_slopes: FloatArray
    """(2,) least of the largest beta, and of the largest omega."""
    jumped: Points
    """Those of `at_least` to which f jumped: from there on it is no less."""

    @classmethod
    def through(
        cls,
        at_most: Points,
        at_least: Points,
        rest: float,
        least: tuple[float, float] = (0.0, 0.0),
        most: tuple[float, float] = (np.inf, np.inf),
        *,
        knows_rest: bool = False,
    ) -> Envelope:
        """The envelope that these points leave; see `Envelope`."""
        risen = _out_of_proportion(at_most, at_least, rest) & knows_rest | _flatter_beyond(at_most, at_least)
        jumps, jumped = _chords_over(risen, at_most, at_least), risen.any(axis=1)
        chords, ends = _chords(at_most, at_least)
        if len(ends):
            # a line that rises so steeply began no higher, over a jump either
            begins = at_least.num_bytes[ends] - _times(at_least.sizes[ends], chords.sizes) * chords.num_bytes
            rest = max(min(rest, float(begins.min())), 0.0)
        chords, ends = _chords(at_most, at_least, left_out=jumps)
        rest = min(rest, float(at_most.num_bytes.min()) - 1.0)
        alone = np.where((chords.sizes > 0) & (chords.sizes[:, ::-1] <= 0), chords.sizes, np.inf)
        least_slopes = np.maximum((chords.num_bytes[:, None] / alone).max(axis=0, initial=0.0), least)
        grown = at_most.num_bytes - rest
        beside = np.maximum(grown - least_slopes[0] * at_most.sizes[:, 0], 0.0)
        gathers = at_most.sizes[:, 1] > 0
        # outputs are alive together with the activations
        omega = (beside[gathers] / at_most.sizes[gathers, 1]).min() if gathers.any() else 0.0
        most_slopes = max(most[0], least_slopes[0]), max(min(float(omega), most[1]), least_slopes[1])
        return cls(
            rest=rest,
            corners=_extreme_lines(at_most.sizes, grown, most_slopes),
            at_most=at_most,
            at_least=at_least,
            chords=chords,
            ends=ends,
            least_slopes=least_slopes,
            jumped=Points(sizes=at_least.sizes[jumped], num_bytes=at_least.num_bytes[jumped]),
        )

    @property
    def slopes(self) -> tuple[float, float]:
        """Least and most of the largest beta."""
        return float(self.least_slopes[0]), float(self.corners[:, 1].max())

    def most(self, sizes: FloatArray) -> FloatArray:
        """(N,) for `sizes` (N, 2)."""
        rows = np.column_stack([np.ones(len(sizes)), sizes])
        highest = self.rest + (rows @ self.corners.T).max(axis=1)
        # after a jump f may be above every line; it never falls
        no_less = np.where((sizes[:, None] >= self.at_least.sizes).all(axis=2), self.at_least.num_bytes, 0.0)
        highest = np.maximum(highest, np.maximum(no_less.max(axis=1, initial=0.0), self._beyond_jump(sizes)))
        is_enough = (self.at_most.sizes >= sizes[:, None]).all(axis=2)
        return np.asarray(np.minimum(highest, np.where(is_enough, self.at_most.num_bytes, np.inf).min(axis=1)))

    def sure(self, sizes: FloatArray, more_rests: FloatArray | float = 0.0) -> FloatArray:
        """(N,) the least of what grows, from rest or from a jump, for `sizes` (N, 2); no more than `most`.

        `more_rests`, (N,), is what rests beyond `rest` there.
        """
        grown = np.maximum(self.rest + more_rests + sizes @ self.least_slopes, self._beyond_jump(sizes))
        return np.asarray(np.minimum(grown, self.most(sizes)))

    def _beyond_jump(self, sizes: FloatArray) -> FloatArray:
        """(N,) what surely grows from a jump before `sizes`, (N, 2); 0 where there was none."""
        further = sizes[:, None] - self.jumped.sizes
        grown = np.where((further >= 0).all(axis=2), self.jumped.num_bytes + further @ self.least_slopes, 0.0)
        return np.asarray(grown.max(axis=1, initial=0.0))

    def least(self, sizes: FloatArray) -> FloatArray:
        """(N,) for `sizes` (N, 2)."""
        bounds = [self.sure(sizes)]
        if len(self.at_least.num_bytes):
            before = np.maximum(self.at_least.sizes - sizes[:, None], 0.0) @ self.corners[:, 1:].max(axis=0)
            bounds.append((self.at_least.num_bytes - before).max(axis=1))
        if len(self.ends):
            further = sizes[:, None] - self.at_least.sizes[self.ends]
            beyond = self.at_least.num_bytes[self.ends] + _times(further, self.chords.sizes) * self.chords.num_bytes
            bounds.append(np.where((further >= 0).all(axis=2), beyond, 0.0).max(axis=1))
        return np.asarray(np.minimum(np.max(bounds, axis=0), self.most(sizes)))


def _times(sizes: FloatArray, over: FloatArray) -> FloatArray:
    """(..., C) how many times `sizes`, (..., C, 2), go over chords, (C, 2), in the sizes that these grow in."""
    grows = over > 0
    return np.asarray(np.where(grows, sizes / np.where(grows, over, 1.0), np.inf).min(axis=-1))


def steepest_from(num_bytes: float, at_most: list[tuple[float, float, float]]) -> tuple[float, float]:
    """The largest beta, and omega, of a line that has so many bytes without samples and is nowhere above `at_most`."""
    rises = [[(peak - num_bytes) / sizes[which] for *sizes, peak in at_most if sizes[which] > 0] for which in (0, 1)]
    share, micro_batch = (max(0.0, min(rise, default=0.0)) for rise in rises)
    return share, micro_batch


def begins_above(num_bytes: float, at_most: Points, at_least: Points) -> bool:
    """Whether f is more than `num_bytes` without samples: it is convex, so before two points it fell no faster.

    Points count that lie on one ray from the origin. Worked: 1,020 bytes with 4 samples and 1,040 with 8
    were no less than 1,000 without.
    """
    near, far = at_least.sizes[:, None], at_most.sizes[None]
    share, further = near[..., 0], far[..., 0] - near[..., 0]
    on_a_ray = (further > 0) & (share * far[..., 1] == far[..., 0] * near[..., 1])
    fallen = (at_most.num_bytes[None] - at_least.num_bytes[:, None]) * share / np.where(on_a_ray, further, 1.0)
    return bool((on_a_ray & (at_least.num_bytes[:, None] - fallen > num_bytes)).any())


def _extreme_lines(sizes: FloatArray, num_bytes: FloatArray, most_slopes: tuple[float, float]) -> FloatArray:
    """(K, 3) the corners of all coefficients with ``F + beta s + omega m <= bytes`` at every point."""
    # a point with no less of both sizes and fewer bytes says all that this one does
    no_smaller = (sizes >= sizes[:, None]).all(axis=2) & (num_bytes <= num_bytes[:, None])
    is_same = no_smaller & no_smaller.T
    binds = ~(no_smaller & (~is_same | (np.arange(len(sizes)) < np.arange(len(sizes))[:, None]))).any(axis=1)
    rows = np.column_stack([np.ones(binds.sum()), sizes[binds]])
    limits = num_bytes[binds]
    unit, scale = limits.max(), np.maximum(rows.max(axis=0), 1.0)
    # no sample takes more than all of it; a micro-batch that is 0 everywhere does not count
    most = np.array([np.inf, *most_slopes])
    most = np.where(np.isinf(most), [np.inf, limits.max(), limits.max()], most)
    largest = most * scale / unit
    capped = np.flatnonzero(np.isfinite(largest))
    matrix = np.concatenate([rows / scale, np.eye(3)[capped], -np.eye(3)])
    bounds = np.concatenate([limits / unit, largest[capped], np.zeros(3)])
    return np.asarray(corners_of(matrix, bounds) / scale * unit)


def corners_of(matrix: FloatArray, bounds: FloatArray) -> FloatArray:
    """(K, d) the corners of all x >= 0 with ``matrix @ x <= bounds``: (M, d) and (M,), scaled to units of 1."""
    few = np.array(list(combinations(range(len(matrix)), matrix.shape[1])))
    few = few[np.abs(np.linalg.det(matrix[few])) > LEAST_VOLUME]
    corners = np.linalg.solve(matrix[few], bounds[few][..., None])[..., 0]
    corners = corners[(corners @ matrix.T <= bounds + ROUNDING).all(axis=1)]
    return np.asarray(np.unique(np.maximum(corners, 0.0), axis=0))


def _chords(at_most: Points, at_least: Points, left_out: BoolArray | bool = False) -> tuple[Points, NDArray[np.int64]]:
    """The steepest rises of f to each point of `at_least`, and the places of those points; none of `left_out`, (L, M).

    Up to three for each: one in each size alone, and one in both.
    """
    over = at_least.sizes[:, None] - at_most.sizes[None]
    risen = at_least.num_bytes[:, None] - at_most.num_bytes[None]
    largest = np.maximum(at_least.sizes, 1.0)[:, None]
    chosen = set()
    for counted in ((True, False), (False, True), (True, True)):
        matches = ((over > 0) == counted).all(axis=2) & (risen > 0) & ~np.asarray(left_out)
        steepness = np.where(matches, risen / np.where(over > 0, over / largest, 0.0).max(axis=2, initial=1e-9), 0.0)
        begins = steepness.argmax(axis=1) if steepness.size else np.zeros(0, dtype=int)
        chosen |= {(int(end), int(begins[end])) for end in range(len(begins)) if steepness[end, begins[end]] > 0}
    ends, begins = np.array(sorted(chosen), dtype=int).reshape(-1, 2).T
    return Points(sizes=over[ends, begins], num_bytes=risen[ends, begins]), ends


def _out_of_proportion(at_most: Points, at_least: Points, rest: float) -> BoolArray:
    """(L, M) between which points, of `at_most` and at which f was measured, it rose more than in proportion.

    What is above rest does not, if every line begins at rest or above. Worked: 2 rest, and f is 5.7 with 4 samples, so
    6 take no more than ``2 + 3.7 x 6 / 4 = 7.55``. Where they take 8, it jumped by 0.45 at least. Sizes that ran out of
    memory are left out: f was not measured there.
    """
    fewer, more = at_most.sizes[None], at_least.sizes[:, None]
    without = np.where(more > 0, np.inf, 0.0)  # of a size that was 0 no other is a multiple
    ratio = np.where(fewer > 0, more / np.where(fewer > 0, fewer, 1.0), without).max(axis=2)
    measured = (at_least.sizes[:, None] == at_most.sizes[None]).all(axis=2).any(axis=1)
    is_larger = (more >= fewer).all(axis=2) & (ratio > 0) & np.isfinite(ratio) & measured[:, None]
    proportion = rest + np.maximum(at_most.num_bytes - rest, 0.0) * np.where(is_larger, ratio, 1.0)
    return np.asarray(is_larger & (at_least.num_bytes[:, None] > (1 + ROUNDING) * proportion))


def _flatter_beyond(at_most: Points, at_least: Points) -> BoolArray:
    """(L, M) between which points, of `at_most` and `at_least`, f rose more steeply than it did to a point further on.

    But for jumps it is convex, so there was one. Worked: f is 2 with 1 sample, 4 with 3 and 5 with 5: from 3 on it rose
    by 0.5 a sample, so of the 2 before at least 1 was a jump.
    """
    found = np.zeros((len(at_least.sizes), len(at_most.sizes)), dtype=bool)
    for end, (sizes, num_bytes) in enumerate(zip(at_least.sizes, at_least.num_bytes, strict=True)):
        # a point with more of one size bounds f with as much, too
        over, risen = np.maximum(sizes - at_most.sizes, 0.0), num_bytes - at_most.num_bytes
        is_chord = (over > 0).any(axis=1) & (risen > 0)
        further = at_most.sizes[:, None] - sizes
        on_chord = num_bytes + _times(further, over[is_chord]) * risen[is_chord]
        is_below = (further >= 0).all(axis=2) & (at_most.num_bytes[:, None] < (1 - ROUNDING) * on_chord)
        found[end, is_chord] = is_below.any(axis=0)
    return found


def _chords_over(found: BoolArray, at_most: Points, at_least: Points) -> BoolArray:
    """(L, M) which chords begin no further, and end no nearer, than one of those `found`, (L, M)."""
    over = np.zeros(found.shape, dtype=bool)
    for end, begin in np.argwhere(found):
        ends = (at_least.sizes >= at_least.sizes[end]).all(axis=1)
        over |= np.outer(ends, (at_most.sizes <= at_most.sizes[begin]).all(axis=1))
    return over
