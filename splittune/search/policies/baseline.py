"""The way to the baseline: the even split at the fewest accumulation steps that fits, unless it seems to be slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.candidates.table import SplitTable, open_rows
from splittune.search.choices import LIKELY
from splittune.search.judged_trials import JudgedTrial, known_infeasible
from splittune.search.policies.base import Proposal, SearchState
from splittune.split import BatchSplit


@dataclass(frozen=True, slots=True)
class FindBaseline:
    """The even split at the fewest steps that almost surely fits, if clearly fewer than fitted so far.

    Each such trial lets the memory model vouch for a larger one: 16 steps, then 10, then 6. One that is predicted to be
    slower than an even split that fits is none that anybody would choose, and not worth its memory.
    """

    min_fewer_steps: float = 0.05
    """The part of the steps that another trial must save. A choice. Larger: the baseline is found
    in fewer trials and may have more steps than it needs."""

    min_chance: float = 0.99
    """How likely it must keep its headroom; `LIKELY` where trials do not tell what is held at rest. A choice.
    Smaller: larger strides, and more of them run out of memory."""

    def propose(self, state: SearchState) -> Proposal | None:
        if not state.any_ran:
            return None
        evens = state.tables.evens
        fitting = evens.where(evens.is_any_of([trial.split for trial in state.trials if trial.fits]))
        few_enough = (1 - self.min_fewer_steps) * fitting.steps.min(initial=np.inf)
        wanted = evens.where(open_rows(evens, state.trials) & (evens.steps <= few_enough))
        wanted = wanted.where(self._fits(wanted, state))
        wanted = wanted.where(_log_s(wanted, state) < _log_s(fitting, state).min(initial=np.inf))
        return _towards_baseline(wanted.split(0)) if len(wanted) else None

    def _fits(self, evens: SplitTable, state: SearchState) -> BoolArray:
        """(N,) which even splits likely keep their headroom, see `min_chance`."""
        needed = state.memory.needed(evens.steps, evens.shards)
        chances = needed.chance_below(state.limits)
        least = self.min_chance if state.memory.knows_rest else LIKELY
        return np.asarray((chances >= least) & state.is_grown_slowly(evens))


def _log_s(table: SplitTable, state: SearchState) -> FloatArray:
    """(N,) predicted logarithms of seconds a step."""
    return state.time.predict(table.steps, table.shards).log_s


def bisect_baseline(even_splits: Sequence[BatchSplit], trials: Sequence[JudgedTrial]) -> Proposal | None:
    """The even split to measure next where no model tells which fit; None once that is known.

    `even_splits` begin with the fewest steps. Steps are doubled until a split fits (the last one is
    tried before giving up), then halved between the last failure and the first that fits. Example:
    64 samples that fit from 5 steps on are measured at 1, 2, 4, 8, 6 and 5.
    """
    known = {trial.split: trial.fits for trial in trials}
    fits = [known.get(split, False if known_infeasible(split, trials) else None) for split in even_splits]
    first = next((place for place, answer in enumerate(fits) if answer), None)
    beyond = len(fits) if first is None else first
    last_failure = max((place for place, answer in enumerate(fits[:beyond]) if answer is False), default=-1)
    if first is None:
        last = len(fits) - 1
        place = min(max(0, 2 * last_failure + 1), last)
        return _towards_baseline(even_splits[place]) if last_failure < last else None
    return _towards_baseline(even_splits[(last_failure + first) // 2]) if first - last_failure > 1 else None


def _towards_baseline(split: BatchSplit) -> Proposal:
    reason = f"even split at k={split.accumulation_steps}: looking for the baseline"
    return Proposal(split=split, kind="baseline", reason=reason)
