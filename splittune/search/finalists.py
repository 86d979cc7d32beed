"""The last word: the baseline and the fastest splits are measured again, and the best wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import TYPE_CHECKING

from splittune.hardware.base import largest_readings
from splittune.profiling.measurement import Measurement, Outcome
from splittune.profiling.noise import relative_standard_error
from splittune.search.judged_trials import JudgedTrial, rank

if TYPE_CHECKING:
    from splittune.split import BatchSplit

# How many of the fastest are measured once more. A choice. More cost trials; fewer let one lucky
# trial win.
NUM_FINALISTS = 3
# The first trial may have been cold, and took longer than it would now: it is measured once more if it lacks at most
# this part of the speed of the fastest. A choice. Larger: more searches measure one more split.
MOST_COLD = 0.1
# Two splits are too close to call within so many standard errors of their difference. A choice, the
# usual 95 %. Larger: more splits are measured twice, and headroom decides more often.
TOO_CLOSE = 2.0
# Of those headroom decides only among the ones that lack at most this part of the speed, however
# much noise there is. A choice: a third of the regret that a search aims at.
HEADROOM_PRICE = 0.003
# A split that gains no more than this over an even baseline is not worth uneven shares. A choice:
# nobody sees a thousandth, and everybody understands even shares.
EVEN_PRICE = 0.001
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


def confirm_finalists(
    even_splits: Sequence[BatchSplit],
    trials: Sequence[JudgedTrial],
    measure_again: Callable[[BatchSplit, str, int], Measurement],
) -> Confirmed:
    """Measure the finalists among `trials` once more, by `measure_again(split, reason, turn)`.

    1. The baseline. One that does not fit again gives way to the measured even split with the next
       more steps.
    2. The fastest splits in turn, until `NUM_FINALISTS` of them fitted again, the baseline among
       them if it is that fast.
    3. The first trial that fitted, which may have been cold, if it lacks at most `MOST_COLD`.
    4. Those within the noise of the fastest, a second time in the opposite order: a drift of the
       clocks then falls on all alike. Both measurements count.

    The fastest wins. Of those within the noise of it, at most `HEADROOM_PRICE` behind it and no
    slower than the baseline, the one with most headroom wins, then the one that was faster before.
    Over the baseline it must gain more than `EVEN_PRICE`, else that wins.
    A split at which the allocator had to retry gives way to one that is close.
    """
    fitting = sorted((trial.measurement for trial in trials if trial.fits), key=rank)
    fits = {measurement.split for measurement in fitting}
    confirmed: dict[BatchSplit, Measurement] = {}

    def fits_again(split: BatchSplit, reason: str) -> bool:
        if split not in confirmed:
            confirmed[split] = measure_again(split, reason, 1)
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
    first = next((trial for trial in trials if trial.fits), None)
    if first is not None and first.throughput >= (1 - MOST_COLD) * (fitting[0].throughput or 0.0):
        fits_again(first.measurement.split, "the first trial, which may have been cold, once more")
    close = _within_noise([m for m in confirmed.values() if m.outcome is Outcome.OK])
    if len(close) > 1 and any(relative_standard_error(m.main_times_s) > 0 for m in close):
        for once in reversed(close):
            again = measure_again(once.split, "too close to call: in turn, once more", 2)
            confirmed[once.split] = _together(once, again)
    baseline = baseline_again()  # where it failed in the second turn, the next
    in_order = [confirmed[m.split] for m in fitting if m.split in confirmed]
    close = _worth_their_headroom(_within_noise(_off_the_edge([m for m in in_order if m.outcome is Outcome.OK])))
    # within the noise, too, nothing is chosen that looks slower than what it is compared with
    least = 0.0 if baseline is None or baseline.is_on_the_edge else baseline.throughput or 0.0
    best = max((m for m in close if (m.throughput or 0.0) >= least), key=_least_headroom, default=None)
    if best is not None and least >= (1 - EVEN_PRICE) * (best.throughput or 0.0):
        best = baseline
    return Confirmed(best=best, baseline=baseline)


def _off_the_edge(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Without those in which the allocator retried, as long as another is close to the fastest."""
    fastest = max((m.throughput or 0.0 for m in measurements), default=0.0)
    safe = [m for m in measurements if not m.is_on_the_edge]
    is_close = any((m.throughput or 0.0) >= (1 - EDGE_PRICE) * fastest for m in safe)
    return safe if is_close else list(measurements)


def _within_noise(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those that cannot be told from the fastest, in the order given; all have run."""
    fastest = max(measurements, key=lambda m: m.throughput or 0.0, default=None)
    if fastest is None:
        return []
    return [m for m in measurements if _is_close(m, fastest)]


def _worth_their_headroom(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Without those that lack more speed than headroom is worth."""
    fastest = max((m.throughput or 0.0 for m in measurements), default=0.0)
    return [m for m in measurements if (m.throughput or 0.0) >= (1 - HEADROOM_PRICE) * fastest]


def _is_close(one: Measurement, fastest: Measurement) -> bool:
    behind = 1 - (one.throughput or 0.0) / (fastest.throughput or 1.0)
    error = hypot(relative_standard_error(one.main_times_s), relative_standard_error(fastest.main_times_s))
    return bool(behind <= TOO_CLOSE * error)


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
