"""What ran devices out of memory though it was foretold to fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.models.memory_readings import MemoryReadings, Size


@dataclass(frozen=True, slots=True)
class Jump:
    """A device ran out of memory at a size at which it was foretold to fit."""

    device: int
    size: Size
    accumulates: bool
    least_bytes: float
    """It took so much more than was foretold, if it was to fit with the margin, too; else 0: that was a risk."""


def taken_by_jumps(jumps: Iterable[Jump], readings: MemoryReadings, device: int, shares: FloatArray) -> FloatArray:
    """(N,) what such shares took at least beyond what was foretold, on a card as large; 0 where none jumped.

    An algorithm, and the blocks that are free beside what it takes, depend on the share. So it was not the share where
    either device ran with one as large. From the largest that ran to the one that ran out it may have begun anywhere:
    in between such a part of it counts. Worked: 7 samples ran and 10 ran out, by 3 GiB at least, so for 9 count 2.
    """
    taken = np.zeros(len(shares))
    for jump in jumps:
        pair, (share, _) = (device, jump.device), jump.size
        ran = readings.largest_share(pair)
        if readings.is_as_large(*pair) and share > ran:
            begun = np.clip((shares - ran) / (share - ran), 0.0, 1.0)
            taken = np.maximum(taken, begun * jump.least_bytes)
    return taken
