"""What every device's peak memory may be, and how likely that is within a limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.models.memory_readings import REPEATABILITY

# What is foretold is that much above what peaks most likely are: limits within it are partly kept. It is what readings
# and the line through them may be off, `REPEATABILITY` each.
SLACK = 2 * REPEATABILITY
# Where nothing shows that what the allocator adds is steady, it adds an even part of one to this power of the most that
# it may: a quarter of it on average. A choice: of 1, 2 and 3 the larger two foretold best, and as well, which of 3,400
# splits ran, on layers that allocate tensor by tensor. Larger: more risks are taken.
OVERHEAD_POWER = 3
# What a jump takes, at least so much, has Pareto's distribution with this exponent. A choice: with 1 two more of 122
# searches end over 10 % behind, after as many OOMs. Larger: more risks after a jump.
JUMP_POWER = 2
DRAWN = 5  # so many parts stand for all


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Peak reserved bytes of every device, (N, n) each."""

    sure: FloatArray
    """What surely grows with the sizes takes so much; it may be less than `least`."""
    least: FloatArray
    foretold: FloatArray
    """At most, if predictions come true."""
    overhead: FloatArray
    """The part of `foretold` that torch's allocator adds to what is alive at once."""
    steady: FloatArray
    """Probability that it adds as much; else it is any part, small ones more likely."""
    most: FloatArray
    """With the margin for what no trial has shown."""
    most_after_cache_flush: FloatArray
    """`most` once the allocator, running short, has handed back its free blocks: more is an OOM."""
    surprise: FloatArray
    """How often a peak exceeds `foretold`."""
    least_part: FloatArray
    """Of what is not known to be alive, from `sure` to `foretold` less `overhead`, the part that it takes at least."""
    trend_least: FloatArray
    trend_most: FloatArray
    """If peaks go on as they grew: so much at least, and at most."""
    goes_on: FloatArray
    """Probability that they do, times the part of what is not known that they leave out then."""
    jump: FloatArray
    """What a share took at least beyond what was foretold, and ran a device out of memory; of it a part for a share
    between what ran and that; 0 for what ran."""

    def chance_below(self, limits: FloatArray) -> FloatArray:
        """(N,) probability to stay within `limits`, (n,), on the device where it is least.

        The logarithm of what is not known to be alive is even between `least_part` of the most that it can be and all
        of it; from `SLACK` below the most it rises to 1. On top the allocator adds its `overhead`, or, unless that is
        `steady`, a part of it. `surprise` goes beyond, evenly up to `most`. Before the overhead was told apart such
        chances were too low above a half and too high below it, so their smooth step ``3 c^2 - 2 c^3`` is taken.
        Worked: 2 GiB that surely grow and up to 32 more, within a limit of 10, with a margin up to 42 GiB, give
        ``c = 0.8 (1 - log(32 / 8) / log(32)) = 0.48``, and 0.47. And 8 GiB that are alive, with up to 8 on top that are
        not steady, stay within 10 where no more than a quarter is added, so with parts up to ``0.25^(1/3) = 0.63``.

        Where peaks go on as they grew, that alone decides: if they do with a chance of 0.75, and are at 9 GiB then, the
        first is ``0.75 + 0.25 x 0.47 = 0.87``. But what takes `least` takes no less, however peaks grew: of 216 splits
        beyond such a limit none ran.

        What took at least so much beyond what was foretold took twice as much with a chance of a quarter, and so on:
        where that leaves too little, it counts. Worked: a jump of 1 GiB at least, with 4 GiB left, takes all of it with
        a chance of a sixteenth, so what had a chance of 1 has one of 0.94.
        """
        within = self.steady * self._is_alive_within(limits - self.overhead)
        for part in (np.arange(DRAWN) + 0.5) / DRAWN:
            adds = part**OVERHEAD_POWER * self.overhead
            within += (1 - self.steady) / DRAWN * self._is_alive_within(limits - adds)
        beyond = np.clip((limits - self.foretold) / np.maximum(self.most - self.foretold, 1.0), 0.0, 1.0)
        chances = (1 - self.surprise) * within + self.surprise * beyond
        chances = chances**2 * (3 - 2 * chances)
        on_trend = np.clip((limits - self.trend_least) / np.maximum(self.trend_most - self.trend_least, 1.0), 0.0, 1.0)
        chances += self.goes_on * (on_trend - chances)
        chances = np.where(limits >= self.most, 1.0, np.where(limits < self.least, 0.0, chances))
        jumps_over = np.clip(self.jump / np.maximum(limits - self.foretold, 1.0), 0.0, 1.0) ** JUMP_POWER
        return np.asarray((chances * (1 - jumps_over)).min(axis=1))

    def _is_alive_within(self, limits: FloatArray) -> FloatArray:
        """(N, n) probability that what is alive at once stays within `limits`, (N, n), if predictions come true."""
        most = self.foretold - self.overhead
        unknown, left = np.maximum(most - self.sure, 1.0), np.maximum(limits - self.sure, 1e-3)
        parts = np.log(np.maximum(unknown / left, 1.0)) / -np.log(np.clip(self.least_part, 1e-9, 0.999))
        within = np.clip(1 - parts, 0.0, 1.0)
        nearly = np.clip(1 - (most - limits) / np.maximum(SLACK * most, 1.0), 0.0, 1.0)
        return np.asarray(within + (1 - within) * nearly)
