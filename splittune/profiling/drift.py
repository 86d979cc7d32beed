"""Whether devices are as fast as they were: an anchor split, measured again every few trials."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit

logger = logging.getLogger(__name__)

# The anchor is measured again after so many trials. A choice: fewer notice a drift sooner, and cost
# a trial each.
NUM_TRIALS_BETWEEN = 4
# Step times of one split repeat to this part, on devices that neither warm up nor share their power
# with others. A choice. Larger, and a slow drift goes unnoticed.
USUAL_CHANGE = 0.03


class DriftWatch:
    """Keeps the fastest split as the anchor; says when to measure it again, and what that shows.

    Trials are compared over minutes. Meanwhile devices warm up, lower their clocks, or get busy
    with something else. The same split measured then and now tells that apart from what splits
    differ by.

    Worked: an anchor of 100 ms, known to 1 %, takes 106 ms four trials later. That is more than 3 %
    and the two errors of 1 %, so the devices have become 6 % slower; at 102 ms nothing has changed.

    Args:
        is_modelled: the clock is modelled: it does not drift, and nothing is measured again.
    """

    def __init__(self, *, is_modelled: bool) -> None:
        self._is_modelled = is_modelled
        self._anchor: Measurement | None = None
        self._num_trials = 0
        """Since the anchor was last measured."""

    def remember(self, measurement: Measurement) -> None:
        """A trial has ended: is it the fastest?"""
        step_s = measurement.step_time_s
        self._num_trials += 1
        if measurement.outcome is Outcome.OK and step_s is not None:
            fastest_s = None if self._anchor is None else self._anchor.step_time_s
            if fastest_s is None or step_s < fastest_s:
                self._anchor, self._num_trials = measurement, 0

    def due(self) -> BatchSplit | None:
        """The split to measure again before the next trial; None most of the time."""
        if self._is_modelled or self._anchor is None or self._num_trials < NUM_TRIALS_BETWEEN:
            return None
        self._num_trials = 0
        return self._anchor.split

    def compare(self, again: Measurement) -> str | None:
        """A sentence on how the anchor has changed; None if noise explains it."""
        before = self._anchor
        assert before is not None, "only what was due is compared"
        was_s, is_s = before.step_time_s, again.step_time_s
        if was_s is None or is_s is None:
            return None
        change = is_s / was_s - 1
        if abs(change) <= USUAL_CHANGE + (before.relative_error or 0.0) + (again.relative_error or 0.0):
            return None
        self._anchor = again
        return (
            f"The devices have become {abs(change):.0%} {'slower' if change > 0 else 'faster'}: {again.split} took "
            f"{was_s * 1e3:.1f} ms a step, and takes {is_s * 1e3:.1f} ms now. Earlier trials compare that much less "
            "well; the best of them are measured again at the end, in turn."
        )


def anchored(measure: Callable[[BatchSplit], Measurement], *, is_modelled: bool) -> Callable[[BatchSplit], Measurement]:
    """`measure`, with the anchor measured again first where that is due.

    What the anchor showed is noted on the next trial. The anchor runs before a trial, as a trial of
    its own. Whatever becomes of it, no finished trial is lost, and no later one is blamed for it.
    """
    watch = DriftWatch(is_modelled=is_modelled)

    def measure_with_anchor(split: BatchSplit) -> Measurement:
        anchor = watch.due()
        note = None if anchor is None else watch.compare(measure(anchor))
        if note is not None:
            logger.warning(note)
        measurement = measure(split)
        watch.remember(measurement)
        return measurement if note is None else replace(measurement, notes=(note, *measurement.notes))

    return measure_with_anchor
