"""What a sample leaves in memory for the backward: no peak grows by less, and hardly one by much more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from splittune.search.models.memory_readings import REPEATABILITY, MemoryReadings

# A forward copies parameters in half precision where the job has it, and keeps them for the backward: half as large as
# they are, so at most this part of what rests, which may be little else where most are frozen. They are of no sample.
COPIED_PART = 0.5
# What a sample takes at the peak is at most so many times what it left: gradients of activations come on top, and what
# is computed again. A choice: real models showed up to 1.9. Larger, and peaks that have not grown yet may grow more.
MOST_AT_PEAK = 4.0


class Slopes(NamedTuple):
    """Bytes of a sample."""

    share: float
    """Of the device's own share."""
    micro_batch: float
    """Of the whole micro-batch, on GPU 0."""


def saved_slopes(readings: MemoryReadings, replicas: Sequence[int]) -> tuple[Slopes, Slopes]:
    """Least and most of what a forward leaves of a sample; 0 and infinite where no trial tells.

    A replica's samples are all its own, and those of GPU 0 are alike; what it has beyond is outputs of the micro-batch.
    Those of the batch before, which the forward's replace, may have hidden them.

    Worked: 4 GiB rest on a replica, and it leaves 3 GiB for 2 samples. That is 0.5 to 1.5 a sample, ``(3 - 4 / 2) / 2``
    to ``3 / 2``, for copies of parameters may be among it. Then it leaves 6 GiB for 4: it made none, so 1.5. Where more
    samples leave more than in proportion, say 7 GiB, the rise counts: 2 a sample.
    """
    least, most, points = 0.0, np.inf, sorted(readings.saved(replicas))
    copied = min((COPIED_PART * rest for *_, rest in points), default=np.inf)
    for place, (share, _, saved, _) in enumerate(points):
        least = max(least, (saved * (1 - REPEATABILITY) - copied) / share)
        most = min(most, saved * (1 + REPEATABILITY) / share)
        for fewer, _, before, _ in points[:place]:
            if fewer < share:
                risen = saved * (1 - REPEATABILITY) - before * (1 + REPEATABILITY)
                least = max(least, risen / (share - fewer))
    most = max(least, most)
    left = [saved * (1 + REPEATABILITY) - least * share for share, _, saved, _ in points]
    copied = max(0.0, min([copied, *left]))
    least_output, most_output, untold = 0.0, np.inf, readings.untold_bytes([0], least_runs=1)
    for share, size, saved, rest in readings.saved([0]):
        own = most * share if share else 0.0
        beside = min(copied, COPIED_PART * rest) + own
        least_output = max(least_output, (saved * (1 - REPEATABILITY) - beside) / size)
        most_output = min(most_output, ((saved + untold) * (1 + REPEATABILITY) - least * share) / size)
    return Slopes(least, least_output), Slopes(most, max(most_output, least_output))
