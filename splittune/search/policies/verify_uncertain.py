"""The most uncertain prediction that could hide the best split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.acquisition import optimistic_gain
from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class VerifyUncertain:
    """The split with the best upper confidence bound: the fastest, if its prediction is off enough.

    Where the latest predictions were off by more than their deviations, the bound is that much
    further away (`Calibration`): a search does not end on models that were wrong just now.
    """

    deviations: float = 2
    """The optimism: faster than predicted by this many standard deviations. A choice, the usual 95 %.
    Larger: more trials before the search ends."""
    min_gain: float = 0.01
    """Optimistic gain, in logarithms of time, that is worth a trial. A choice: the regret that a search
    aims at. Smaller: more trials before the search ends."""

    def propose(self, state: SearchState) -> Proposal | None:
        scores = state.scores
        if scores is None or not state.any_fits:
            return None
        gain = optimistic_gain(scores, self.deviations * state.doubt)
        gain = np.where(scores.surely_feasible, gain, -np.inf)
        row = int(gain.argmax())
        if gain[row] < self.min_gain:
            return None
        prediction = f"{state.throughput(scores, row):,.0f} samples/s, give or take {scores.times.deviation[row]:.1%}"
        reason = f"to verify an uncertain prediction: {prediction}"
        return Proposal(split=scores.table.split(row), kind="verify", reason=reason)
