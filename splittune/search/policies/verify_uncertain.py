"""With trials to spare, the most uncertain prediction that could hide the best split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.acquisition import optimistic_gain
from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class VerifyUncertain:
    """The split with the best optimistic gain: the fastest, if its prediction is off enough."""

    deviations: float = 2
    """The optimism: faster than predicted by this many standard deviations. Set on drawn problems,
    where deviations are often too small. Larger: more trials before the search ends."""
    min_gain: float = 0.01
    """Optimistic gain, in logarithms of time, that is worth a trial. Set on drawn problems.
    Smaller: more trials before the search ends."""

    def propose(self, state: SearchState) -> Proposal | None:
        if not state.any_fits:
            return None
        scores = state.scores
        if scores is None:
            return None
        gain = optimistic_gain(scores, self.deviations * state.doubt)
        gain = np.where(scores.surely_feasible, gain, -np.inf)
        row = int(gain.argmax())
        if gain[row] < self.min_gain:
            return None
        prediction = f"{state.throughput(scores, row):,.0f} samples/s, give or take {scores.times.deviation[row]:.1%}"
        reason = f"to verify an uncertain prediction: {prediction}"
        return Proposal(split=scores.table.split(row), kind="verify", reason=reason)
