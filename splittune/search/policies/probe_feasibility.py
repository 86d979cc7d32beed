"""A smaller split first, where it shows whether a promising one fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.acquisition import most_informative
from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class ProbeFeasibility:
    """A safe split whose memory shows whether a more promising one, which is not safe, fits."""

    min_gain: float = 0.003
    """Expected improvement times feasibility, relative, that the promising split must have. A
    choice: below it the difference is noise. Smaller: more trials go to splits that are not the
    best themselves."""
    times_safe_gain: float = 2
    """It must also be worth this many times the best safe split: a probe costs a trial, and the
    split it is for another. Hence 2."""
    min_feasibility: float = 0.5
    """How likely the probe itself must keep its headroom. A choice: more likely than not. Larger:
    fewer probes; smaller: probes that tell little because they fail."""
    max_targets: int = 20
    """How many promising splits are considered, the best first. A choice, for speed alone: the ones
    further down rarely need another probe than the first."""

    def propose(self, state: SearchState) -> Proposal | None:
        scores = state.scores
        if scores is None:
            return None
        at_least = max(self.times_safe_gain * scores.value[scores.best_row], self.min_gain)
        may_probe = np.flatnonzero(scores.cannot_oom & (scores.feasibility >= self.min_feasibility))
        promise = np.where(scores.cannot_oom, 0.0, scores.gain * scores.feasibility)
        for target in np.argsort(-promise, kind="stable")[: self.max_targets]:
            if promise[target] <= at_least:
                return None
            unsure_devices = np.flatnonzero(scores.needed.most[target] > scores.limits)
            wanted = scores.table.shards[target]
            row = most_informative(scores.table, wanted, unsure_devices, may_probe, state.trials)
            if row is not None:
                reason = f"to learn whether {scores.table.split(int(target))} fits"
                return Proposal(split=scores.table.split(row), kind="probe feasibility", reason=reason)
        return None
