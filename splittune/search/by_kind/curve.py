"""What is known of one kind of card: its time for any share, and the largest share that fits."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from splittune.profiling.measurement import Measurement, Outcome

logger = logging.getLogger(__name__)

# The look for the largest share ends once that and the smallest that fails differ by a 100th part, and after so many
# runs. Both are choices, those of a plan's largest micro-batch (`planning/largest.py`).
PRECISION = 100
MAX_RUNS = 12
# The second share looked at is so many times the first: growth of memory is not known before. A choice.
BLIND_FACTOR = 8


@dataclass(slots=True)
class Growth:
    """What a sample adds to a card's peak: the same on all kinds of cards, for the job is the same."""

    bytes_per_sample: float | None = None
    """None where it is not known yet."""


class CardCurve:
    """One kind of card, seen by `measure`: a card's run with a share, judged by the headroom demanded of it.

    Times between shares that were measured lie on straight lines, and so do those beyond them.

    Worked: 4 samples in 10 ms and 8 in 18 ms make 14 ms for 6 and 34 ms for 16; 8 GiB with 10 GiB to spare, growing by
    1 GiB a sample, make 10 samples the next to be tried.

    Args:
        count: how many cards there are.
        growth: what is known of it from cards of other kinds, and is told them.
        measure: a run with a share of at least `least`.
        demand_bytes: what a card must keep free.
        limit: the largest share that is ever tried.
        asked_for: shares up to here are the user's own; beyond, a job that refuses one ends the look for larger ones.
        least: the smallest share that is ever tried: a job with BatchNorm cannot be trained with one sample.
    """

    def __init__(
        self,
        count: int,
        measure: Callable[[int], Measurement],
        *,
        growth: Growth,
        demand_bytes: int,
        limit: int,
        asked_for: int,
        least: int = 1,
    ) -> None:
        self.count, self.is_bracketed, self._growth = count, False, growth
        self._measure, self._demand_bytes, self._limit, self._asked_for = measure, demand_bytes, limit, asked_for
        self._least = least
        self._runs: dict[int, Measurement] = {}
        self._timed: list[int] = []
        self._fails = limit + 1
        self._fits = 0
        self._most: int | None = None

    def run(self, share: int) -> Measurement:
        """What a card does with a share, at least the least; run once."""
        share = max(self._least, share)
        if share not in self._runs:
            found = self._runs[share] = self._measure(share)
            if found.throughput is not None:
                insort(self._timed, share)
            if found.outcome is Outcome.OK:
                self._fits = max(self._fits, share)
            else:
                self._fails = min(self._fails, share)
                self._most = None if self._most is None else min(self._most, share - 1)
        return self._runs[share]

    def time_s(self, share: int) -> float:
        """Seconds of forward and backward: of a rank without samples those of the one that stands in."""
        share, timed = max(self._least, share), self._timed
        if share in self._runs and self._runs[share].micro_step_time_s is not None:
            return self._seconds(share)
        if len(timed) < 2:
            return self._seconds(timed[0]) * share / timed[0] if timed else float(share)
        place = min(max(bisect_left(timed, share), 1), len(timed) - 1)
        before, after = timed[place - 1], timed[place]
        start_s, end_s = self._seconds(before), self._seconds(after)
        return max(0.0, start_s + (end_s - start_s) * (share - before) / (after - before))

    @property
    def most(self) -> int:
        """The largest share that fits, found to a 100th part; 0 where not even the least does."""
        if self._most is None:
            self._most = self._find_most()
        return self._most

    def _find_most(self) -> int:
        if self.run(self._least).outcome is not Outcome.OK:
            return 0
        for _ in range(MAX_RUNS):
            step = max(1, self._fits // PRECISION)
            if self._fails - self._fits <= step:
                break
            share = min(max(self._next(), self._fits + step), self._limit)
            share = (self._fits + self._fails) // 2 if share >= self._fails else share
            try:
                self.run(share)
            except Exception as error:
                if share <= self._asked_for:
                    raise
                reason = f"{type(error).__name__}: {error}"
                logger.info("a share of %d samples was refused by the job: %s", share, reason)
                return self._fits
        self.is_bracketed = self._fails <= self._limit and self._fails - self._fits <= max(1, self._fits // PRECISION)
        return self._fits

    def _next(self) -> int:
        """Where the growth of the peak puts the limit."""
        last = self._timed[-1]
        if len(self._timed) > 1:
            before = self._timed[-2]
            self._growth.bytes_per_sample = (self._spare_bytes(before) - self._spare_bytes(last)) / (last - before)
        growth = self._growth.bytes_per_sample
        return int(last + self._spare_bytes(last) / growth) if growth and growth > 0 else BLIND_FACTOR * last

    def _spare_bytes(self, share: int) -> int:
        return self._runs[share].memory[0].headroom_bytes - self._demand_bytes

    def _seconds(self, share: int) -> float:
        return self._runs[share].micro_step_time_s or 0.0
