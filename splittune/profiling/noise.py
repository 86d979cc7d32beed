"""How far the median of a few step times may be off."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median, stdev

# Standard error of the median of a large normal sample, over that of its mean: the root of pi / 2.
MEDIAN_OVER_MEAN = 1.2533


def relative_standard_error(times_s: Sequence[float]) -> float:
    """Standard error of the median of `times_s`, over that median; 0 for fewer than two.

    ``1.2533 s / sqrt(n) / median``, where s is the standard deviation of the n times. A clock that
    repeats exactly has none. Worked: 1.00, 1.01 and 1.02 s have s = 0.01 s, so it is
    1.2533 x 0.01 / sqrt(3) / 1.01 = 0.72 %.
    """
    if len(times_s) < 2:
        return 0.0
    return MEDIAN_OVER_MEAN * stdev(times_s) / sqrt(len(times_s)) / median(times_s)
