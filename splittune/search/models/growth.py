"""What peaks grow with, for people: one likeliest line, where `MemoryModel` gives bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splittune.profiling.measurement import Measurement
from splittune.search.models.least_squares import non_negative
from splittune.search.models.memory_readings import REPEATABILITY, MemoryReadings, Reading

# A reading within this part of the smallest may be another phase's peak, which no size changes.
# Larger, and slow growth is taken for none.
FLAT = 2 * REPEATABILITY

# Places in `Size`.
SHARE = 0
MICRO_BATCH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of the peak of forward and backward; None if no two trials differ in that size."""

    per_sample_bytes: float | None
    """Bytes for each sample of a device's own share."""
    per_micro_batch_sample_bytes: float | None
    """Bytes on GPU 0 for each sample of the whole micro-batch: gathered outputs, and the loss."""


def growth_of(runs: Sequence[Measurement]) -> Growth:
    """Non-negative least squares over all of `runs`, which hold the memory of the same devices.

    The replicas are fitted first: ``peak = F + beta s + gamma [k > 1]``, with s the share and k the
    accumulation steps. GPU 0 has the same beta, so the rest of its peak gives omega, for each
    sample of the micro-batch m: ``peak - beta s = F + omega m + gamma [k > 1]``. A single device's
    share is the micro-batch: all growth counts as its share's.

    Worked, in MiB: replicas at 11 with 2 samples and 15 with 4 give a beta of 2. GPU 0 at 18 with 2
    of 8 samples, and at 22 with 4 of 8, leaves 14 at m = 8. At 40 with 3 of 48 samples it leaves 34
    at m = 48, so omega is 20 / 40 = 0.5.
    """
    if not runs:
        return Growth(per_sample_bytes=None, per_micro_batch_sample_bytes=None)
    num_devices = runs[0].split.num_devices
    seen = MemoryReadings(num_devices, list(runs))
    if num_devices == 1:
        return Growth(per_sample_bytes=_slope(seen.readings(0), column=SHARE), per_micro_batch_sample_bytes=0.0)
    replicas = [reading for device in range(1, num_devices) for reading in seen.readings(device)]
    per_sample = _slope(replicas, column=SHARE)
    if per_sample is None:
        return Growth(per_sample_bytes=None, per_micro_batch_sample_bytes=None)
    gpu0 = seen.readings(0)
    return Growth(
        per_sample_bytes=per_sample,
        per_micro_batch_sample_bytes=_slope(
            gpu0, column=MICRO_BATCH, less_bytes=[per_sample * reading.size[SHARE] for reading in gpu0]
        ),
    )


def _slope(readings: Sequence[Reading], *, column: int, less_bytes: Sequence[float] | None = None) -> float | None:
    """Bytes for each unit of one column, beside a constant and [k > 1]; None if it never varies.

    `less_bytes` is taken off each reading's peak first.
    """
    kept = _off_the_flat(readings, column)
    sizes = np.array([readings[i].size[column] for i in kept])
    if len(np.unique(sizes)) < 2:
        return None
    peaks = np.array([float(readings[i].peak_bytes) for i in kept])
    if less_bytes is not None:
        peaks -= np.array([less_bytes[i] for i in kept])
    accumulates = np.array([float(readings[i].accumulates) for i in kept])
    unit, largest = max(float(np.abs(peaks).max()), 1.0), float(sizes.max())
    matrix = np.column_stack([np.ones(len(kept)), sizes / largest, accumulates])
    solution = non_negative(matrix, np.maximum(peaks / unit, 0.0))
    return float(solution[1] * unit / largest)


def _off_the_flat(readings: Sequence[Reading], column: int) -> list[int]:
    """Indices of readings above the smallest peak of their kind; all if those have one size."""
    flat = {kind: min((r.peak_bytes for r in readings if r.accumulates == kind), default=0) for kind in (False, True)}
    above = [i for i, r in enumerate(readings) if r.peak_bytes > flat[r.accumulates] * (1 + FLAT)]
    if len({readings[i].size[column] for i in above}) < 2:
        return list(range(len(readings)))
    return above
