"""The best upper confidence bound: an uncertain prediction, or a split that only likely fits, worth its risk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.candidates.acquisition import CandidateScores, optimistic_gain
from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class UpperConfidenceBound:
    """The most to gain if a prediction is off enough, less what an OOM costs: a search ends where that is little.

    Worked: 0.06 to gain with a chance of 0.8 to run is worth ``0.8 x 0.06 - 0.2 x 0.1 = 0.028``, and a
    trial; with a chance of 0.6 it is worth less than nothing. A split that surely fits is worth what
    it may gain. Where the latest predictions were off by more than their deviations, the bound is that
    much further away (`Calibration`): a search does not end on models that were wrong just now.

    The gain counts by the cube root of how likely the split keeps its headroom. What the allocator
    holds may be less with a larger shard, so a trial that ran and kept too little headroom rules out
    nothing but its own shards here.
    """

    min_gain: float = 0.01
    """Worth, in logarithms of time, of a trial. A choice: the regret that a search aims at. Smaller: more
    trials before the search ends."""
    oom_price: float = 0.1
    """What a trial that runs out of memory costs, in logarithms of time. A choice: nobody minds one on the
    way to a throughput that is a tenth higher. Larger: fewer risks."""
    deviations: float = 2
    """The optimism: faster than predicted by this many standard deviations. A choice, the usual 95 %.
    Larger: more trials before the search ends."""

    def propose(self, state: SearchState) -> Proposal | None:
        if not state.any_fits:
            return None
        scores = state.score_candidates([trial for trial in state.trials if not trial.ran])
        if scores is None:
            return None
        runs = np.where(scores.cannot_oom, 1.0, scores.needed.feasibility_below(state.memory.budget_bytes))
        fits = self._feasibility(state, scores)
        gain = optimistic_gain(scores, self.deviations * state.doubt)
        worth = gain * np.cbrt(fits) * runs - self.oom_price * (1 - runs)
        worth = np.where(state.is_grown_slowly(scores.table), worth, -np.inf)
        row = int(worth.argmax())
        if worth[row] < self.min_gain:
            return None
        split, predicted = scores.table.split(row), f"{state.throughput(scores, row):,.0f} samples/s"
        predicted = f"{predicted}, give or take {scores.times.deviation[row]:.1%}"
        if scores.surely_feasible[row]:
            return Proposal(split=split, kind="verify", reason=f"to verify an uncertain prediction: {predicted}")
        chances = f"runs with a chance of {runs[row]:.0%}, keeps its headroom with one of {fits[row]:.0%}"
        return Proposal(split=split, kind="risky", reason=f"predicted {predicted}; worth a risk: {chances}")

    @staticmethod
    def _feasibility(state: SearchState, scores: CandidateScores) -> FloatArray:
        """(N,) how likely each keeps its headroom; 0 with a shard that kept too little before.

        On GPU 0, which gathers outputs, that holds for micro-batches that are no smaller.
        """
        fits = np.where(scores.surely_feasible, 1.0, scores.needed.feasibility_below(scores.limits))
        shards, sizes = scores.table.shards, scores.table.micro_batch_sizes
        for trial in state.trials:
            for device in trial.oom_devices:
                is_same = shards[:, device] == trial.split.shard_sizes[device]
                fits[is_same & ((device > 0) | (sizes >= trial.split.micro_batch_size))] = 0.0
        return fits
