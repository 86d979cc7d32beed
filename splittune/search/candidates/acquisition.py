"""What the models say of every split that could be measured next, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from splittune.search.attempts import Attempt
from splittune.search.candidates.table import Floats, SplitTable
from splittune.search.models.memory import Interval
from splittune.search.models.step_time import StepTimes

# Kernels work on tiles of so many samples.
TILE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScores:
    """What the models say of each split in `table`."""

    table: SplitTable
    times: StepTimes
    best_log_s: float
    """Of the fastest split that fits, as the model sees it; infinite where none does."""
    gain: Floats
    """Expected, in logarithms of time."""
    needed: Interval
    limits: Floats
    """(n,) what each device may hold and keep its headroom."""
    chance: Floats
    """From 0 to 1: how much of the interval keeps its headroom."""
    cannot_oom: NDArray[np.bool_]
    """Cannot run out of memory, though it may turn out to keep too little headroom."""

    @property
    def surely_feasible(self) -> NDArray[np.bool_]:
        """(N,) cannot run out of memory, and keeps its headroom."""
        return np.asarray(self.cannot_oom & (self.chance == 1))


def most_informative(
    table: SplitTable,
    wanted: Floats,
    doubtful: NDArray[np.int64],
    rows: NDArray[np.int64],
    attempts: Sequence[Attempt],
) -> int | None:
    """Of `rows` the one that tells most about the doubtful devices' memory with these shards, if it tells anything new."""
    if not len(rows) or not len(doubtful):
        return None
    ran = [attempt.split.shard_sizes for attempt in attempts if attempt.measurement.throughput is not None]
    measured = np.array(ran, dtype=float)
    told = np.stack([_tells(table.shards[rows], wanted, int(device)) for device in doubtful]).min(axis=0)
    told_so_far = min(float(_tells(measured, wanted, int(device)).max()) for device in doubtful)
    return int(rows[told.argmax()]) if told.max() > told_so_far + 0.1 else None


def _tells(shards: Floats, wanted: Floats, device: int) -> Floats:
    """(N,) from 0 to 1: how near splits come to what is wanted of a device.

    A replica's memory is about its share. GPU 0's is also about the micro-batch: the same part of it tells most, and a
    large one.
    """
    if device > 0:
        return np.asarray(np.minimum(shards[:, device] / max(wanted[device], 1), 1))
    sizes, size = shards.sum(axis=1), wanted.sum()
    apart = np.abs(shards[:, 0] / np.maximum(sizes, 1) - wanted[0] / size)
    return np.asarray(np.clip(1 - 2 * apart, 0, 1) * 0.7 + 0.3 * np.minimum(sizes / size, 1))


def fills_tiles(shards: Floats) -> NDArray[np.bool_]:
    """(N,) whether the largest share is a multiple of `TILE`, or of what power of two a smaller one can be."""
    largest = shards.max(axis=1).astype(int)
    tiles = np.minimum(TILE, 2 ** np.floor(np.log2(np.maximum(largest, 1))).astype(int))
    return np.asarray(largest % tiles == 0)


def joint_feasibility(needed: Interval, limits: Floats) -> Floats:
    """(N,) how much of the interval lies within the limits, on the device where that is least; 1 only where all does."""
    width = np.maximum(needed.most - needed.least, 1.0)
    within = np.clip((limits - needed.least) / width, 0.0, 1.0).min(axis=1)
    return np.asarray(np.where((needed.most <= limits).all(axis=1), 1.0, np.minimum(within, 0.999)))


def expected_improvement(gains: Floats, deviations: Floats) -> Floats:
    """Mean of ``max(0, gain)`` where the gain is normal with these means and deviations."""
    deviations = np.maximum(deviations, 1e-9)
    scaled = gains / deviations
    return np.asarray(gains * norm.cdf(scaled) + deviations * norm.pdf(scaled))
