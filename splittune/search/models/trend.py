"""Whether a peak goes on as it grew: a line that passes through the largest ones, and how far it was seen to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.choices import LENGTHSCALE
from splittune.search.models.envelope import ROUNDING, corners_of
from splittune.search.models.memory_readings import REPEATABILITY, Reading

# Readings are taken to be off by no more than these parts where a line passes through all of them then, too. A choice,
# each a quarter of the one before: peaks of tensors alone repeat exactly, those with workspaces do not.
EXACT = (REPEATABILITY / 4, REPEATABILITY / 16)
# A line is drawn through so many points whatever their sizes. A choice: more corners than of as many take long to find.
DRAWN = 6
# A line counts as seen to hold over so much, in logarithms of size, before any further peak confirmed it: one that two
# peaks draw holds at twice the larger size with a chance of a half. A choice: of 0 to 1.4, log 2 and more foretold best
# which splits keep their headroom. Larger: more risks are taken.
ASSUMED = float(np.log(2))
# And so much where peaks of one size alone were read, and what the forward left says how they grow. A choice: of 1.5, 3
# and 6 times `ASSUMED` 3 foretold best which splits run.
ASSUMED_OF_ONE = 3 * ASSUMED
# On GPU 0 without a share what is above rest is of gradients if it is as large as they are, or twice, to this part. A
# choice: on real models it was to 6 %. Larger, and outputs that are as large by chance are taken to be none.
NEAR = 0.1
# Up to this part is nothing: of what a share takes, on top for outputs; of these, what the forward left. A choice.
NOTHING = 0.02


@dataclass(frozen=True, slots=True)
class Trend:
    """The lines ``F + beta s + omega m`` through the largest peaks of a device, and the sizes over which they held.

    A peak is the highest of its phases' lines. `Envelope` bounds it whatever the phases are; where peaks so far lie on
    one line, the likeliest is that the same phase goes on. What was seen over a range of sizes holds over as wide
    a range once more with a chance of a half: so it is if where the next phase takes over is anywhere alike in
    logarithms of size. Sizes that it takes to draw the line do not count as seen; for these there is `ASSUMED`.

    Worked: GPU 0 held 1, 1.2, 1.4 and 1.6 GiB with micro-batches of 1, 2, 3 and 4. From 2 to 4 the line held, and
    log 2 is assumed, so with 5 it holds 1.8 GiB with a chance of ``log(4) / (log(4) + log(5 / 4)) = 0.86``.

    A single size draws no line, but what the forward left grows in proportion, and of what else is above rest something
    between none and all. Worked: of 10 GiB with 2 samples 4 rest, and the forward left 5. With 4 samples it is
    ``10 + 5`` to ``10 + 6``.

    GPU 0 holds outputs beside, and sums gradients. A replica with as many samples tells what these take. What is above
    that, less than gradients are or more than twice as much, and of which the forward left nothing, since an output
    replaced the one before, is all of outputs: it grows in proportion to the micro-batch, and so do those kept of the
    batch before, at most half of it, as the loss makes something as large of an output. Worked: gradients take 1 GiB,
    and of 10 with 2 of 4 samples 2 rest, of which 1 may be kept. A replica took 5 with 2, so 3 are of outputs, and 2 of
    8 samples take ``10 + 3 + 1``.

    Without a share, what is as large as gradients, or with those that arrive twice, to `NEAR`, grows by the excess
    alone, until what the forward left does by more. Worked: had it taken 1.1 above rest, of which the forward left
    none, twice as many samples would take 1.2.
    """

    corners: FloatArray
    """(K, 3) F, beta and omega of the extreme lines."""
    largest: FloatArray
    """(2,) the largest share, and micro-batch, on the line."""
    seen: FloatArray
    """(2,) `ASSUMED`, and the logarithms of how many times as large as those that it takes to draw the line."""
    only_beyond: bool = False
    """Whether it tells of larger sizes alone: what one size took may be what takes as much without samples."""

    @classmethod
    def through(
        cls,
        readings: Sequence[Reading],
        replicas: Sequence[Reading] = (),
        gradient_bytes: float = np.inf,
        kept_bytes: float = 0.0,
    ) -> Trend | None:
        """Through as many of the largest peaks as lie on one line; None of fewer than two, unless one size tells.

        Gradients take `gradient_bytes`. Of what GPU 0 rests on, up to `kept_bytes` may be outputs of the batch before,
        which its readings leave out.
        """
        peaks: dict[tuple[float, float], list[int]] = {}
        for reading in readings:
            peaks.setdefault(reading.size, []).append(reading.peak_bytes)
        order = sorted(peaks, key=lambda size: (-max(peaks[size]), -size[1], -size[0]))
        if len(order) == 1:
            largest = max(readings, key=lambda one: one.peak_bytes)
            return cls._of_outputs(largest, replicas, gradient_bytes, kept_bytes) or cls._through_one(readings)
        sizes = np.array(order, dtype=float).reshape(-1, 2)
        most = np.array([min(peaks[size]) for size in order], dtype=float)
        least = np.array([max(peaks[size]) for size in order], dtype=float)

        count, corners = _lines_through(sizes, most * (1 + REPEATABILITY), least * (1 - REPEATABILITY))
        if count < 2:
            return None
        for off in EXACT:
            on_line, exacter = _lines_through(sizes[:count], most[:count] * (1 + off), least[:count] * (1 - off))
            corners = exacter if on_line == count else corners
        # the smallest first: what it takes to draw the line
        rows = np.column_stack([np.ones(count), sizes[:count]])[::-1]
        rank = np.linalg.matrix_rank(rows)
        drawn = next(i for i in range(2, count + 1) if np.linalg.matrix_rank(rows[:i]) == rank)
        largest, before = rows[:, 1:].max(axis=0), rows[:drawn, 1:].max(axis=0)
        seen = ASSUMED + np.log(np.maximum(largest, 1.0) / np.maximum(before, 1.0))
        return cls(corners, largest, seen)

    @classmethod
    def _through_one(cls, readings: Sequence[Reading]) -> Trend | None:
        """Through the peak of a single size; None where no trial tells what the forward left."""
        peak = max(reading.peak_bytes for reading in readings)
        for one in readings:
            # the parameters of a replica are copied in the forward of a single step: they are of no sample
            is_of_samples = one.accumulates or one.size[1] > 0
            if is_of_samples and one.saved_bytes is not None and one.resting_bytes is not None:
                lines = [
                    (peak - grown, grown / size * (which == 0), grown / size * (which == 1))
                    for grown in (one.saved_bytes, peak - one.resting_bytes)
                    for which, size in enumerate(one.size)
                    if size
                ]
                return cls(np.array(lines), np.array(one.size), np.full(2, ASSUMED_OF_ONE), True)
        return None

    @classmethod
    def _of_outputs(
        cls, reading: Reading, replicas: Sequence[Reading], gradient_bytes: float, kept_bytes: float
    ) -> Trend | None:
        """On GPU 0, where steps accumulate; None where nothing tells outputs apart."""
        (share, size), peak, left = reading.size, reading.peak_bytes, reading.saved_bytes
        own = _of_share(share, replicas)
        is_told = reading.accumulates and reading.resting_bytes is not None and np.isfinite(gradient_bytes)
        if not size or not is_told or left is None or own is None:
            return None
        of_share, left_of_share = own
        rest = (reading.resting_bytes or 0) + kept_bytes
        grown, left_of_outputs = max(peak - rest - of_share, 1.0), left - left_of_share
        num_gradients = round(grown / max(gradient_bytes, 1.0))
        excess = grown - num_gradients * gradient_bytes
        lines = []
        if share == 0 and num_gradients in (1, 2) and abs(excess) <= NEAR * grown:
            lines = [(peak, max(excess, 0.0)), (rest + left, left)]
        elif left_of_outputs <= NOTHING * grown and not gradient_bytes <= grown < 2 * gradient_bytes:
            lines = [(peak, grown + min(kept_bytes, grown / 2))]
        if grown <= NOTHING * of_share or not lines:
            return None
        of_sample = of_share / max(share, 1.0)
        corners = [(at_size - outputs - of_share, of_sample, outputs / size) for at_size, outputs in lines]
        return cls(np.array(corners), np.array(reading.size), np.full(2, ASSUMED_OF_ONE), only_beyond=True)

    def between(self, sizes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(N,) the least and the most bytes on the line, for `sizes`, (N, 2)."""
        on_lines = np.column_stack([np.ones(len(sizes)), sizes]) @ self.corners.T
        return on_lines.min(axis=1), on_lines.max(axis=1)

    def chance(self, sizes: FloatArray) -> FloatArray:
        """(N,) probability that the line still holds at `sizes`, (N, 2)."""
        asked = np.log(np.maximum(sizes, 1.0) / np.maximum(self.largest, 1.0))
        asked = np.where((sizes > 0) & (self.largest == 0), np.inf, np.maximum(asked, 0.0))
        is_no_larger = (asked == 0).all(axis=1)
        return np.where(is_no_larger & self.only_beyond, 0.0, (self.seen / (self.seen + asked)).min(axis=1))


def _of_share(share: float, replicas: Sequence[Reading]) -> tuple[float, float] | None:
    """What a replica held above rest with such a share at most, and its forward left; None where none tells."""
    told = [
        (one.peak_bytes - one.resting_bytes, one.saved_bytes)
        for one in replicas
        if one.size[0] == share and one.resting_bytes is not None and one.saved_bytes is not None
    ]
    return max(told, default=None if share else (0.0, 0.0))


def _lines_through(sizes: FloatArray, at_most: FloatArray, at_least: FloatArray) -> tuple[int, FloatArray]:
    """How many of the first points lie on one line, and (K, 3) the corners of all F, beta and omega of such lines.

    At these points ``at_least <= F + beta s + omega m <= at_most``. No coefficient is negative, and that of a size that
    is 0 everywhere is 0. From `DRAWN` points on, those whose sizes tell of one another, up to `LENGTHSCALE`, are not
    drawn through: that some line passes each is enough.
    """
    rows = np.column_stack([np.ones(len(sizes)), sizes])
    unit, scale = at_most.max(initial=1.0), np.maximum(rows.max(axis=0, initial=0.0), 1.0)
    matrix, bounds, lines = -np.eye(3), np.zeros(3), np.zeros((0, 3))
    logs = np.log1p(sizes)
    count, drawn = 0, np.zeros(len(sizes), dtype=bool)
    for row, most, least in zip(rows / scale, at_most / unit, at_least / unit, strict=True):
        is_near = (np.abs(logs[drawn] - logs[count]) < LENGTHSCALE).all(axis=1).any()
        if drawn.sum() >= DRAWN and is_near:
            on_lines = lines @ row
            if on_lines.min() > most or on_lines.max() < least:
                break
        else:
            matrix, bounds = np.concatenate([matrix, [row, -row]]), np.concatenate([bounds, [most, -least]])
            corners = corners_of(matrix, bounds)
            if not len(corners):
                break
            binds = (np.abs(corners @ matrix.T - bounds) <= ROUNDING).any(axis=0)  # the others say nothing more
            matrix, bounds, lines, drawn[count] = matrix[binds], bounds[binds], corners, True
        count += 1
    return count, np.asarray(lines / scale * unit)
