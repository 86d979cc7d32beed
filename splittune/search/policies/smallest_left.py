"""What to try when nothing fitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.generate import neighbours
from splittune.search.candidates.table import SplitTable, concatenate, open_rows, singles_table
from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class SmallestLeft:
    """The smallest split that no failure has ruled out, for as long as none fits.

    It is the last policy: before a trial ran no other wants one, and afterwards it is what remains
    when the models see no candidate any more. Of splits with the same micro-batch, the one with the
    fewest samples on the devices that likely ran out of memory comes first, then the one with the
    most steps. Where splits are too many to list those listed may all fail: then what one sample fewer, or a quarter
    of a share, on a device leaves of those that failed is tried, until no failure leaves any open.
    """

    def propose(self, state: SearchState) -> Proposal | None:
        if state.any_fits:
            return None
        table = state.tables.listed
        if state.space.shares == "each" and not state.space.min_shard_size:
            table = concatenate(table, singles_table(state.space))
        table = table.where(open_rows(table, state.trials))
        if not len(table) and not state.tables.is_complete:
            table = concatenate(table, *(neighbours(t.split, state.space.min_shard_size) for t in state.trials))
            table = table.where(open_rows(table, state.trials))
            if len(table):
                reason = "nothing fitted so far: some samples moved from the devices that failed"
                split = table.split(self._furthest_from_failures(table, state))
                return Proposal(split=split, kind="smallest left", reason=reason)
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

    @staticmethod
    def _furthest_from_failures(table: SplitTable, state: SearchState) -> int:
        """Where the largest part that a device has of the least share with which it failed is smallest.

        Worked: GPU 0 failed with 5 samples and GPU 1 with 4. Of (4, 3, 4) and (3, 3, 5), with parts of 4 / 5 and
        3 / 4, the second is next.
        """
        least = np.full(state.space.num_devices, np.inf)
        for trial in state.trials:
            for device in trial.likely_oom_devices:
                least[device] = min(least[device], trial.split.shard_sizes[device])
        return int((table.shards / np.maximum(least, 1.0)).max(axis=1).argmin())

    def _whole_batch(self, table: SplitTable, state: SearchState) -> Proposal | None:
        """One step holds one copy of the gradients less, and may fit where no accumulation does.

        Evenly first. If that fails, GPU 0 gets the share furthest from those that failed: too much for
        it, or too much left to the others. Example: of 64 samples on 3 devices 21, 43, 10.
        """
        evens = state.tables.evens.where(state.tables.evens.steps == 1)
        reason = "nothing fits that accumulates: the whole batch at once"
        failed = [trial.split.gpu0_bsz for trial in state.trials if trial.split.accumulation_steps == 1]
        if len(evens) and not failed:
            return Proposal(split=evens.split(0), kind="whole batch", reason=reason)
        ends = [-1, state.space.global_batch_size + 1]
        distances = np.abs(table.shards[:, :1] - np.array([*failed, *ends])).min(axis=1)
        return Proposal(split=table.split(int(distances.argmax())), kind="whole batch", reason=reason)
