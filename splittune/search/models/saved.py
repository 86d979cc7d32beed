"""What a sample leaves in memory for the backward: no peak grows by less, and hardly one by much more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from splittune.search.choices import TOLERANCE
from splittune.search.models.memory_readings import REPEATABILITY, MemoryReadings

# A forward copies parameters in half precision where the job has it, and keeps them for the backward: half as large as
# they are, so at most this part of what rests, which may be little else where most are frozen. They are of no sample.
COPIED_PART = 0.5
# What a sample takes at the peak is at most so many times what it left: gradients of activations come on top, and what
# is computed again. A choice: real models showed up to 1.9. Larger, and peaks that have not grown yet may grow more.
MOST_AT_PEAK = 4.0
# Of outputs so many times what they left comes on top on GPU 0: what the loss computes of them, and their gradients.
OUTPUTS_ON_TOP = 2.0


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
    least_output, most_output, untold = 0.0, np.inf, readings.untold_bytes([0])
    for share, size, saved, rest in readings.saved([0]):
        own = most * share if share else 0.0
        beside = min(copied, COPIED_PART * (rest + untold)) + own
        least_output = max(least_output, (saved * (1 - REPEATABILITY) - beside) / size)
        most_output = min(most_output, ((saved + untold) * (1 + REPEATABILITY) - least * share) / size)
    return Slopes(least, least_output), Slopes(most, max(most_output, least_output))


def larger_on_gpu0(
    readings: MemoryReadings, most_output: float, *, accumulates: bool
) -> list[tuple[float, float, float]]:
    """The most that GPU 0 holds with shares that only replicas ran with: (share, micro-batch, bytes).

    On a card as large a sample takes as much. So GPU 0 holds no more than it did, or what its forward left, what a
    replica held with more samples beyond what as many left there, and what comes on top for outputs. That is of the
    micro-batch, as is what came on top of all samples before, unless it did not grow with it: then it was of another
    phase, and for outputs comes no more than `OUTPUTS_ON_TOP` times `most_output`, what one left.

    Worked: GPU 0 held 10 GiB with 1 of 3 samples and with 1 of 5, of that 5 GiB before the backward, of which an output
    left 0.1. Replicas left 2 with 1 sample, and held at most 6 with 2. So with 2 of 5 samples GPU 0 holds
    ``5 + (6 - 2) + 2 x 0.5 = 10`` GiB at most, and with 2 of 3 no more than before, 10, either.
    """
    runs = [run for run in readings.runs if (run.split.accumulation_steps > 1) == accumulates]
    left: dict[int, float] = {}
    held: dict[int, float] = {}
    gpu0: list[tuple[int, int, int, int]] = []
    for run in runs:
        for device, (share, memory) in enumerate(zip(run.split.shard_sizes, run.memory, strict=True)):
            before, peak, rest = memory.before_backward_bytes, memory.batch_peak_bytes, memory.resting_bytes
            if device == 0 and before is not None:
                gpu0.append((share, run.split.micro_batch_size, before, peak))
            elif share and before is not None and readings.is_as_large(0, device):
                left[share] = min(before, left.get(share, np.inf))
                held[share] = max(peak, held.get(share, 0.0))
                if accumulates and rest is not None:
                    left[0] = min(rest, left.get(0, np.inf))
    on_top = [(peak - before) / size for _, size, before, peak in gpu0]
    of_output = min(on_top, default=0.0)
    if max(on_top, default=0.0) > (1 + TOLERANCE) * of_output:
        of_output = min(of_output, OUTPUTS_ON_TOP * most_output)
    ran = max((run.split.gpu0_bsz for run in runs), default=0)
    points: dict[tuple[int, int], float] = {}
    for share, most in held.items():
        for own, size, before, peak in gpu0:
            if share > ran and own in left:
                num_bytes = (1 + REPEATABILITY) * max(before + most - left[own] + of_output * size, peak)
                points[share, size] = min(num_bytes, points.get((share, size), np.inf))
    return [(float(share), float(size), num_bytes) for (share, size), num_bytes in points.items()]
