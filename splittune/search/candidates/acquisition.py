"""What the models say of every candidate, and the acquisition functions that rank them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr  # of scipy.stats, which takes half a second to import, nothing else is needed

from splittune.search.arrays import BoolArray, FloatArray, IntArray
from splittune.search.candidates.table import SplitTable
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import Interval
from splittune.search.models.step_time import StepTimes

# Samples that kernels work on together: on tensor cores sizes that 8 divides are the fast ones.
TILE = 8
# How much faster a split with full tiles may be than predicted, in logarithms of time, until a
# trial had full tiles: no line through other sizes foresees them. Set on drawn problems. 0 tries no
# tile for its own sake; a larger bonus tries one before the rest of what is promising.
TILE_BONUS = 0.2
# A split that may turn out to keep too little headroom must be expected to gain this much,
# relative; else the best of those that surely keep it is taken. A choice: below it the difference
# is noise.
MIN_UNSURE_GAIN = 0.003
# Partial feasibility never reads as certain: a choice, any number just below 1 does.
ALMOST_SURE = 0.999
# Similarity in memory: a share's place in the micro-batch and the micro-batch's size weigh as much
# in what a trial tells about GPU 0. A choice: the proportion decides which line the peak is on.
WEIGHT_OF_PROPORTION = 0.7
WEIGHT_OF_SIZE = 0.3
# A probe must be more similar to the wanted split than any trial so far by this much. A choice: it
# keeps probes from repeating one another.
MIN_NEW_SIMILARITY = 0.1


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
        """The row with the most `value`; below `MIN_UNSURE_GAIN` the best that surely fits."""
        value = self.value
        row = int(value.argmax())
        if self.feasibility[row] < 1 and value[row] < MIN_UNSURE_GAIN:
            row = int((value * (self.feasibility == 1)).argmax())
        return row


def expected_improvement(gains: FloatArray, deviations: FloatArray) -> FloatArray:
    """(N,) mean of ``max(0, gain)`` where gains are normal with these means and deviations."""
    deviations = np.maximum(deviations, 1e-9)
    scaled = gains / deviations
    density = np.exp(-(scaled**2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(gains * ndtr(scaled) + deviations * density)


def optimistic_gain(scores: CandidateScores, trials: Sequence[JudgedTrial], deviations: float) -> FloatArray:
    """(N,) upper confidence bound: the gain if a split is so many deviations faster than predicted.

    In logarithms of time. Full tiles add `TILE_BONUS` until a trial had them.
    """
    ran = np.array([trial.split.shard_sizes for trial in trials if trial.ran], dtype=float)
    gain = scores.best_log_s - scores.times.log_s + deviations * scores.times.deviation
    # the first trial has the smallest split there is, which fills its tiles by being small
    had_full_tiles = fills_tiles(ran)[1:].any()
    return np.asarray(gain + TILE_BONUS * (fills_tiles(scores.table.shards) & ~had_full_tiles))


def fills_tiles(shards: FloatArray) -> BoolArray:
    """(N,) whether the largest shard fills its tiles.

    A tile has `TILE` samples. For fewer samples it is the largest power of two: 6 samples do not
    fill tiles of 4, 4 do.
    """
    largest = shards.max(axis=1).astype(int)
    tiles = np.minimum(TILE, 2 ** np.floor(np.log2(np.maximum(largest, 1))).astype(int))
    return np.asarray(largest % tiles == 0)


def joint_feasibility(needed: Interval, limits: FloatArray) -> FloatArray:
    """(N,) the part of the interval within the limits, on the device where that is least.

    It is 1 only where all of the interval is. Example: 8 to 12 GiB has 0.5 below 10 GiB.
    """
    width = np.maximum(needed.most - needed.least, 1.0)
    within = np.clip((limits - needed.least) / width, 0.0, 1.0).min(axis=1)
    return np.asarray(np.where((needed.most <= limits).all(axis=1), 1.0, np.minimum(within, ALMOST_SURE)))


def most_informative(
    table: SplitTable, wanted: FloatArray, unsure_devices: IntArray, rows: IntArray, trials: Sequence[JudgedTrial]
) -> int | None:
    """The row that tells most about the memory of `unsure_devices` with the `wanted` shards (n,).

    Of `rows`, indices into `table`. None where no row is more similar to what is wanted than the
    most similar trial, by `MIN_NEW_SIMILARITY`.
    """
    if not len(rows) or not len(unsure_devices):
        return None
    measured = np.array([trial.split.shard_sizes for trial in trials if trial.ran], dtype=float)
    similar = np.stack([_similarity(table.shards[rows], wanted, int(device)) for device in unsure_devices]).min(axis=0)
    similar_so_far = min(float(_similarity(measured, wanted, int(device)).max()) for device in unsure_devices)
    return int(rows[similar.argmax()]) if similar.max() > similar_so_far + MIN_NEW_SIMILARITY else None


def _similarity(shards: FloatArray, wanted: FloatArray, device: int) -> FloatArray:
    """(N,) from 0 to 1: how near splits come to `wanted` (n,) in what a device's memory depends on.

    A replica's memory depends on its shard: 12 of 16 samples are 0.75. GPU 0's also depends on the
    micro-batch, so there the proportion counts, and how much of the micro-batch there is.
    """
    if device > 0:
        return np.asarray(np.minimum(shards[:, device] / max(wanted[device], 1), 1))
    sizes, size = shards.sum(axis=1), wanted.sum()
    apart = np.abs(shards[:, 0] / np.maximum(sizes, 1) - wanted[0] / size)
    proportion = np.clip(1 - 2 * apart, 0, 1)
    return np.asarray(proportion * WEIGHT_OF_PROPORTION + WEIGHT_OF_SIZE * np.minimum(sizes / size, 1))
