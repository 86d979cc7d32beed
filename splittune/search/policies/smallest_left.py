"""What to try when nothing fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from splittune.search.candidates.table import SplitTable, concatenate, open_rows, singles_table
from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class SmallestLeft:
    """The smallest split that no failure has ruled out, for as long as none ran, or none fits.

    Of splits with the same micro-batch, the one with the fewest samples on the devices that likely
    ran out of memory comes first, then the one with the most steps.
    """

    until: Literal["one ran", "one fits"]
    """When it ends. Until one ran nothing else can be proposed: the models know nothing. Until one
    fits it is what remains when the models see no candidate any more."""

    def propose(self, state: SearchState) -> Proposal | None:
        if state.any_ran if self.until == "one ran" else state.any_fits:
            return None
        table = state.tables.listed
        if state.space.shares == "each" and not state.space.min_shard_size:
            table = concatenate(table, singles_table(state.space))
        table = table.where(open_rows(table, state.trials))
        accumulating = table.where(table.steps > 1)
        if len(accumulating):
            row = self._smallest(accumulating, state)
            reason = "nothing fitted so far: the smallest split left"
            return Proposal(split=accumulating.split(row), kind="smallest left", reason=reason)
        return self._whole_batch(table, state) if len(table) else None

    def _smallest(self, table: SplitTable, state: SearchState) -> int:
        suspects = sorted({device for trial in state.trials for device in trial.likely_oom_devices})
        burden = table.shards[:, suspects].sum(axis=1)
        return int(np.lexsort((-table.steps, burden, table.micro_batch_sizes))[0])

    def _whole_batch(self, table: SplitTable, state: SearchState) -> Proposal | None:
        """One step holds one copy of the gradients less, and may fit where no accumulation does.

        Evenly first. If that fails, shares of GPU 0 are halved between those that leave too much to
        the others and those that are too much for GPU 0.
        """
        evens = state.tables.evens.where(state.tables.evens.steps == 1)
        reason = "nothing fits that accumulates: the whole batch at once"
        if len(evens) and not any(trial.split.accumulation_steps == 1 for trial in state.trials):
            return Proposal(split=evens.split(0), kind="whole batch", reason=reason)
        middle = int(np.argsort(table.shards[:, 0], kind="stable")[len(table) // 2])
        return Proposal(split=table.split(middle), kind="whole batch", reason=reason)
