"""A split that only likely fits: where bounds cannot be trusted, are wide, or leave nothing to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.candidates.acquisition import CandidateScores, optimistic_gain
from splittune.search.policies.base import Proposal, SearchState

When = Literal["not affine", "readings missing", "nothing is safe"]
WHY: dict[When, str] = {
    "not affine": "memory is not affine here",
    "readings missing": "what is held at rest is not known",
    "nothing is safe": "nothing that is safe is left",
}


@dataclass(frozen=True, slots=True)
class RiskyImprovement:
    """The best optimistic gain among the splits likely to run: a search does not end beside a large gain.

    The gain counts by the cube root of how likely the split keeps its headroom. What the allocator
    holds may be less with a larger shard, so a trial that ran and kept too little headroom rules
    out nothing but its own shards here.
    """

    when: When = "not affine"
    """Where memory is not affine no bound can be trusted. Where trials do not tell what is held at
    rest, bounds are wide for want of knowledge, and a failed trial brings what no reading does. And
    where nothing else is left to try, a large gain is worth the risk."""
    min_gain: float = 0.03
    """Optimistic gain, in logarithms of time, that is worth the risk. Set on drawn problems.
    Smaller: more trials that may run out of memory."""
    times_safe_gain: float = 2
    """It must also be worth this many times the best safe split, which will be tried next
    otherwise. A choice. Larger: risks are taken later or never."""
    deviations: float = 2
    """The optimism: faster than predicted by this many standard deviations. A choice,
    the usual 95 %."""
    min_runs: float = 0.5
    """How likely a split must be to run. A choice: more likely than not."""
    max_ooms: int = 1
    """No risk is taken once so many trials have run out of memory; the first is not counted, which is
    made before anything is known. A choice. Larger: more trials that may run out of memory."""

    def propose(self, state: SearchState) -> Proposal | None:
        if state.scores is None or not state.any_fits:
            return None
        num_ooms = sum(not trial.ran for trial in state.trials[1:])
        if num_ooms >= self.max_ooms or not self._is_time(state):
            return None
        scores = state.score_candidates([trial for trial in state.trials if not trial.ran])
        if scores is None:
            return None
        runs = scores.needed.feasibility_below(state.memory.budget_bytes)
        fits = self._feasibility(state, scores)
        gain = optimistic_gain(scores, self.deviations) * np.cbrt(fits)
        at_least = max(self.min_gain, self.times_safe_gain * state.scores.value[state.scores.best_row])
        is_open = ~scores.surely_feasible & (runs >= self.min_runs) & state.is_grown_slowly(scores.table)
        gain = np.where(is_open, gain, -np.inf)
        row = int(gain.argmax())
        if gain[row] < at_least:
            return None
        predicted = f"predicted {state.throughput(scores, row):,.0f} samples/s"
        chances = f"runs with a chance of {runs[row]:.0%}, keeps its headroom with one of {fits[row]:.0%}"
        reason = f"{predicted}; {WHY[self.when]}: {chances}"
        return Proposal(split=scores.table.split(row), kind="risky", reason=reason)

    def _is_time(self, state: SearchState) -> bool:
        if self.when == "not affine":
            return not state.memory.is_affine
        return self.when == "nothing is safe" or not state.memory.knows_rest

    def _feasibility(self, state: SearchState, scores: CandidateScores) -> FloatArray:
        """(N,) how likely each keeps its headroom; 0 with a shard that kept too little before."""
        fits = scores.needed.feasibility_below(scores.limits)
        for trial in state.trials:
            for device in trial.oom_devices:
                fits[scores.table.shards[:, device] == trial.split.shard_sizes[device]] = 0.0
        return fits
