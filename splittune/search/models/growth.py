"""What peaks grow with, for people to read: the likeliest lines through the trials, where `MemoryModel` gives bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from splittune.profiling.measurement import Measurement
from splittune.search.models.memory_readings import MemoryReadings, Reading

Floats = NDArray[np.float64]

# Readings within this of the smallest may be another phase's peak, which grows with nothing.
FLAT = 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Bytes of the peak of forward and backward; None where the trials do not vary what it is about."""

    per_sample_bytes: float | None
    """For each sample of a card's own share."""
    per_micro_batch_sample_bytes: float | None
    """On GPU 0, for each sample of the whole micro-batch: gathered outputs, and the loss."""


def growth_of(runs: Sequence[Measurement]) -> Growth:
    """Least squares with no coefficient below 0, over all of `runs`, which have the memory of the same devices.

    First the replicas: ``peak = F + beta s + gamma [k > 1]``; beta is taken for GPU 0, too, where what it leaves is fitted
    with ``peak - beta s = F + omega m + gamma [k > 1]``. Worked, in MiB: replicas at 11 with 2 samples and 15 with 4 give a
    beta of 2. GPU 0 at 18 with 2 of 8 samples and 22 with 4 of 8 leaves 14 at m = 8; at 40 with 3 of 48 samples it leaves
    34, so omega is 20 / 40 = 0.5. With a single device its share is the micro-batch: all counts as its share's.
    """
    if not runs:
        return Growth(per_sample_bytes=None, per_micro_batch_sample_bytes=None)
    num_devices = runs[0].split.num_devices
    peaks = MemoryReadings(num_devices, list(runs))
    if num_devices == 1:
        return Growth(per_sample_bytes=_slope(peaks.readings(0), column=1), per_micro_batch_sample_bytes=0.0)
    replicas = [reading for device in range(1, num_devices) for reading in peaks.readings(device)]
    per_sample = _slope(replicas, column=1)
    if per_sample is None:
        return Growth(per_sample_bytes=None, per_micro_batch_sample_bytes=None)
    rest = peaks.readings(0)
    return Growth(
        per_sample_bytes=per_sample,
        per_micro_batch_sample_bytes=_slope(rest, column=3, less_bytes=[per_sample * r.row[1] for r in rest]),
    )


def _slope(readings: Sequence[Reading], *, column: int, less_bytes: Sequence[float] | None = None) -> float | None:
    """The coefficient of one column of the rows, beside a constant and [k > 1]; None where all have one size."""
    kept = _off_the_flat(readings, column)
    sizes = np.array([readings[i].row[column] for i in kept])
    if len(np.unique(sizes)) < 2:
        return None
    peaks = np.array([float(readings[i].peak_bytes) for i in kept])
    if less_bytes is not None:
        peaks -= np.array([less_bytes[i] for i in kept])
    accumulates = np.array([readings[i].accumulates for i in kept])
    unit, largest = max(float(np.abs(peaks).max()), 1.0), float(sizes.max())
    matrix = np.column_stack([np.ones(len(kept)), sizes / largest, accumulates])
    solution, _ = nnls(matrix, np.maximum(peaks / unit, 0.0))
    return float(solution[1] * unit / largest)


def _off_the_flat(readings: Sequence[Reading], column: int) -> list[int]:
    """Without the readings at the smallest peaks, as long as two sizes remain."""
    flat = {kind: min((r.peak_bytes for r in readings if r.accumulates == kind), default=0) for kind in (0.0, 1.0)}
    above = [i for i, r in enumerate(readings) if r.peak_bytes > flat[r.accumulates] * (1 + FLAT)]
    if len({readings[i].row[column] for i in above}) < 2:
        return list(range(len(readings)))
    return above
