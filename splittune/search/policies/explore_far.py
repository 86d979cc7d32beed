"""With trials to spare, a split far from all that was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class ExploreFar:
    """The split that shows most of what no model foresees: a faster kernel from some shard size on.

    Its worth is its distance from the measured splits, in logarithms of shards, times what it would
    gain if such a kernel ran. Example: a shard 10 % above the largest measured, predicted 2 %
    slower than the best, is worth 0.095 x (0.1 - 0.02) = 0.0076.
    """

    max_trials: int = 10
    """Nothing is explored from this trial on. A choice, two below the default number of trials,
    which are left for what this one showed."""
    min_worth: float = 5e-4
    """The least distance times gain that is worth a trial. Set on drawn problems. Smaller: shards a
    few per cent from measured ones are tried."""

    def propose(self, state: SearchState) -> Proposal | None:
        if not state.any_fits or len(state.trials) >= self.max_trials:
            return None
        scores = state.optimistic_scores
        if scores is None:
            return None
        lost = scores.times.log_s - scores.best_log_s
        worth = state.time.distance(scores.table.shards) * np.maximum(state.optimism.kernel_gain - lost, 0.0)
        worth = np.where(scores.surely_feasible, worth, -np.inf)
        row = int(worth.argmax())
        if worth[row] < self.min_worth:
            return None
        throughput = state.throughput(scores, row)
        reason = f"far from what was measured: {throughput:,.0f} samples/s unless another kernel runs"
        return Proposal(split=scores.table.split(row), kind="explore far", reason=reason)
