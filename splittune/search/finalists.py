"""The last word: the baseline and the fastest splits are measured again, and the best by all that is known wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot, log
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from splittune.hardware.base import largest_readings
from splittune.profiling.measurement import Measurement, Outcome
from splittune.profiling.noise import relative_standard_error
from splittune.search.candidates.acquisition import expected_improvement
from splittune.search.choices import CONFIDENCE, LEAST_NOISE, MOST_COLD
from splittune.search.judged_trials import JudgedTrial, rank

if TYPE_CHECKING:
    from splittune.split import BatchSplit

# How many of the fastest are measured once more. A choice. More cost trials; fewer let one lucky
# trial win.
NUM_FINALISTS = 3
# What lacks at most this part of the speed wins if it has more headroom, or is even and the baseline; and where no more
# is at stake none is measured again. A choice: nobody sees a thousandth, and everybody understands even shares.
PRICE = 0.001
# Times that a finalist is measured again, at most. A choice: with twice as many no more searches ended within 1 %.
MOST_TURNS = 4
# A split at which the allocator had to free memory and try again is one fragment away from failing.
# Another wins if it lacks at most this part of the speed. A choice.
EDGE_PRICE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """What was measured once more, and won."""

    best: Measurement | None
    """None where no split fitted again."""
    baseline: Measurement | None
    """None where no even split fitted again."""


class Estimates:
    """Logarithms of the seconds a step of each split, from its trial and its confirmations.

    All are averaged, weighed by their inverse variances. The first trial may have been cold, so of that split the
    confirmations count. Worked: a trial says 1.02 s and a confirmation 1.00 s, either give or take 1 %, so the
    estimate is 1.01 s, give or take 0.7 %.

    Args:
        trials: those that fit, oldest first.
    """

    def __init__(self, trials: Sequence[Measurement]) -> None:
        errors = [relative_standard_error(trial.main_times_s) for trial in trials]
        self._noise = max(LEAST_NOISE, median(errors)) if errors else LEAST_NOISE
        self._told: dict[BatchSplit, list[tuple[float, float]]] = {trial.split: [] for trial in trials}
        for trial in trials:
            self.add(trial, least_error=MOST_COLD / 2 if trial is trials[0] else 0.0)

    def add(self, measurement: Measurement, least_error: float = 0.0) -> None:
        """Take in a measurement that fits; its time is off by `least_error` or more, relative."""
        step_s = measurement.step_time_s
        assert step_s is not None
        error = max(relative_standard_error(measurement.main_times_s), self._noise, least_error)
        self._told[measurement.split].append((log(step_s), error))

    def of(self, split: BatchSplit) -> tuple[float, float]:
        """The logarithm of a split's seconds a step, and its standard error."""
        weights = [1 / error**2 for _, error in self._told[split]]
        mean = sum(w * log_s for w, (log_s, _) in zip(weights, self._told[split], strict=True)) / sum(weights)
        return mean, sum(weights) ** -0.5

    def within_noise(self, measurements: Sequence[Measurement]) -> list[Measurement]:
        """Those that cannot be told from the fastest, in the order given."""
        fastest, error = min((self.of(m.split) for m in measurements), default=(0.0, 0.0))
        own = [self.of(m.split) for m in measurements]
        is_close = [log_s - fastest <= CONFIDENCE * hypot(error, other) for log_s, other in own]
        return [m for m, close in zip(measurements, is_close, strict=True) if close]

    def at_stake(self, measurements: Sequence[Measurement]) -> float:
        """What to take the fastest may cost, relative: the most that another of these is expected to improve on it.

        Worked: of two that took as long, give or take 0.7 % each, one is expected to be 0.4 % faster.
        """
        (log_s, error), *others = sorted(self.of(m.split) for m in measurements)
        gains = np.array([log_s - other_s for other_s, _ in others])
        deviations = np.array([hypot(error, own) for _, own in others])
        return float(expected_improvement(gains, deviations).max(initial=0.0))

    def within(self, part: float, measurements: Sequence[Measurement]) -> list[Measurement]:
        """Those that take at most this part longer than the fastest, in the order given."""
        fastest = min((self.of(m.split)[0] for m in measurements), default=0.0)
        return [m for m in measurements if self.of(m.split)[0] <= fastest + part]


def confirm_finalists(
    even_splits: Sequence[BatchSplit],
    trials: Sequence[JudgedTrial],
    measure_again: Callable[[BatchSplit, str, int], Measurement],
) -> Confirmed:
    """Measure the finalists among `trials` once more, by `measure_again(split, reason, turn)`.

    1. The baseline. One that does not fit again gives way to the measured even split with the next
       more steps.
    2. The fastest splits in turn, by `Estimates`, until `NUM_FINALISTS` of them fitted again, the
       baseline among them if it is that fast.
    3. The first trial that fitted, which may have been cold, if it lacks at most `MOST_COLD`.
    4. Those within the noise of the fastest, again and each time in the opposite order: a drift of the
       clocks then falls on all alike. That is while more than `PRICE` is `at_stake`, and up to `MOST_TURNS` times
       in all. All measurements count.

    The fastest by the estimates wins. Of those within the noise of it, at most `PRICE` behind it and no
    slower than the baseline as both were confirmed, the one with most headroom wins, then the one that was
    faster before. Over the baseline it must gain more than `PRICE`, else that wins.
    A split at which the allocator had to retry gives way to one that is close.
    """
    ran = [trial.measurement for trial in trials if trial.fits]
    estimates = Estimates(ran)
    fitting = sorted(ran, key=lambda m: (estimates.of(m.split)[0], rank(m)))
    fits = {measurement.split for measurement in fitting}
    confirmed: dict[BatchSplit, Measurement] = {}

    def fits_again(split: BatchSplit, reason: str) -> bool:
        if split not in confirmed:
            confirmed[split] = measure_again(split, reason, 1)
            if confirmed[split].outcome is Outcome.OK:
                estimates.add(confirmed[split])
        return confirmed[split].outcome is Outcome.OK

    def baseline_again() -> Measurement | None:
        evens = (split for split in even_splits if split in fits)
        return next((confirmed[split] for split in evens if fits_again(split, "the baseline, once more")), None)

    baseline_again()
    num_confirmed = 0
    for place, measurement in enumerate(fitting, start=1):
        if num_confirmed == NUM_FINALISTS:
            break
        num_confirmed += fits_again(measurement.split, f"number {place} of the search, once more")
    fastest = max((measurement.throughput or 0.0 for measurement in ran), default=0.0)
    if ran and (ran[0].throughput or 0.0) >= (1 - MOST_COLD) * fastest:
        fits_again(ran[0].split, "the first trial, which may have been cold, once more")
    for turn in range(2, MOST_TURNS + 1):
        close = estimates.within_noise([m for m in confirmed.values() if m.outcome is Outcome.OK])
        if not close or estimates.at_stake(close) <= PRICE:
            break
        for once in close[:: 1 if turn % 2 else -1]:
            again = measure_again(once.split, "too close to call: in turn, once more", turn)
            confirmed[once.split] = _together(once, again)
            if again.outcome is Outcome.OK:
                estimates.add(again)
    baseline = baseline_again()  # where it failed in a later turn, the next
    in_order = [confirmed[m.split] for m in fitting if m.split in confirmed]
    close = _off_the_edge([m for m in in_order if m.outcome is Outcome.OK])
    close = estimates.within(PRICE, estimates.within_noise(close))
    # within the noise, too, nothing is chosen that looks slower than what it is compared with
    least = 0.0 if baseline is None or baseline.is_on_the_edge else baseline.throughput or 0.0
    best = max((m for m in close if (m.throughput or 0.0) >= least), key=_least_headroom, default=baseline)
    if best is not None and least >= (1 - PRICE) * (best.throughput or 0.0):
        best = baseline
    return Confirmed(best=best, baseline=baseline)


def _off_the_edge(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Without those in which the allocator retried, as long as another is close to the fastest."""
    fastest = max((m.throughput or 0.0 for m in measurements), default=0.0)
    safe = [m for m in measurements if not m.is_on_the_edge]
    is_close = any((m.throughput or 0.0) >= (1 - EDGE_PRICE) * fastest for m in safe)
    return safe if is_close else list(measurements)


def _together(first: Measurement, second: Measurement) -> Measurement:
    """Both measurements of one split as one: all times, the larger peaks.

    The second alone where it did not fit.
    """
    if second.outcome is not Outcome.OK:
        return second
    return replace(
        first,
        micro_step_times_s=first.micro_step_times_s + second.micro_step_times_s,
        update_times_s=first.update_times_s + second.update_times_s,
        unbroken_round_times_s=first.unbroken_round_times_s + second.unbroken_round_times_s,
        whole_step_times_s=first.whole_step_times_s + second.whole_step_times_s,
        memory=largest_readings([first.memory, second.memory]),
        num_alloc_retries=first.num_alloc_retries + second.num_alloc_retries,
    )


def _least_headroom(measurement: Measurement) -> float:
    return min((memory.headroom_bytes for memory in measurement.memory), default=float("-inf"))
