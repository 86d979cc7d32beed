"""The split with the largest expected improvement that cannot run out of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.acquisition import CandidateScores
from splittune.search.policies.base import Proposal, SearchState
from splittune.units import format_bytes


@dataclass(frozen=True, slots=True)
class ExpectedImprovement:
    """The split with the largest expected improvement times feasibility, if that is worth a trial.

    While nothing fits there is nothing to compare with, and any such split is.
    """

    min_gain: float = 0.003
    """Relative improvement that is worth a trial. A choice. Smaller: more trials before the search
    ends."""

    def propose(self, state: SearchState) -> Proposal | None:
        scores = state.scores
        if scores is None:
            return None
        row = scores.best_row
        value = scores.value[row]
        at_least = self.min_gain if state.any_fits else 0.0
        if value <= 0 or value < at_least:
            return None
        return Proposal(split=scores.table.split(row), kind="improve", reason=self._reason(state, scores, row))

    def _reason(self, state: SearchState, scores: CandidateScores, row: int) -> str:
        throughput, deviation = state.throughput(scores, row), scores.times.deviation[row]
        reason = f"predicted {throughput:,.0f} samples/s"
        if state.any_fits:
            gain = throughput * np.exp(scores.best_log_s) / state.space.global_batch_size - 1
            reason += f" ({gain:+.1%}, give or take {deviation:.1%})"
        device = int((scores.limits - scores.needed.most[row]).argmin())
        if scores.feasibility[row] < 1:
            return f"{reason}; runs, headroom on GPU {device} not sure"
        most, limit = (format_bytes(float(b[device])) for b in (scores.needed.most[row], scores.limits))
        return f"{reason}; GPU {device} at most at {most} of {limit}"
