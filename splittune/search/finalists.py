"""The last word: the baseline and the fastest splits are measured once more, and the best of those wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.attempt import Attempt, rank

if TYPE_CHECKING:
    from splittune.split import BatchSplit

NUM_FINALISTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The winner among the confirmed splits, None where none fitted again, and the baseline as confirmed."""

    best: Measurement | None
    baseline: Measurement | None


def confirm_finalists(
    even_splits: Sequence[BatchSplit],
    attempts: Sequence[Attempt],
    measure_again: Callable[[BatchSplit, str], Measurement],
) -> Confirmed:
    """Measure the finalists among `attempts` once more, by `measure_again(split, reason)`, each at most once.

    The baseline comes first; one that does not fit again gives way to the measured even split with the next more
    steps. Then the fastest splits in turn until `NUM_FINALISTS` of them fitted again, the baseline among them if it is
    that fast. The fastest as confirmed wins, of equals the one with more headroom, then the one that was faster
    before.
    """
    fitting = sorted((attempt.measurement for attempt in attempts if attempt.fits), key=rank)
    fits = {measurement.split for measurement in fitting}
    confirmed: dict[BatchSplit, Measurement] = {}

    def fits_again(split: BatchSplit, reason: str) -> bool:
        if split not in confirmed:
            confirmed[split] = measure_again(split, reason)
        return confirmed[split].outcome is Outcome.OK

    evens = (split for split in even_splits if split in fits)
    baseline = next((split for split in evens if fits_again(split, "the baseline, once more")), None)
    num_confirmed = 0
    for place, measurement in enumerate(fitting, start=1):
        if num_confirmed == NUM_FINALISTS:
            break
        num_confirmed += fits_again(measurement.split, f"number {place} of the search, once more")
    in_order = (confirmed[m.split] for m in fitting if m.split in confirmed)
    best = min((m for m in in_order if m.outcome is Outcome.OK), key=rank, default=None)
    return Confirmed(best=best, baseline=None if baseline is None else confirmed[baseline])
