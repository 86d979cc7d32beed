"""What to try when nothing fitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.arrays import BoolArray, FloatArray
from splittune.search.candidates.generate import neighbours
from splittune.search.candidates.table import SplitTable, concatenate, micro_batches, open_rows, singles_table
from splittune.search.policies.base import Proposal, SearchState
from splittune.split.shards import share_out


@dataclass(frozen=True, slots=True)
class SmallestLeft:
    """The smallest split that no failure has ruled out, for as long as none fits.

    It is the last policy: before a trial ran no other wants one, and afterwards it is what remains when the models see
    no candidate any more. Once a trial ran, without enough headroom, the splits that likeliest fit by what it held come
    first. Of splits with the same micro-batch, the one with the fewest samples on the devices that likely lacked memory
    comes first, then the one with the most steps. One step holds one copy of the gradients less, and may fit where no
    accumulation does: then the whole batch is split, after a trial ran with the fewest samples on the devices that
    lacked memory, else evenly first and from then on beneath the shares that failed.
    A trial that ran rules out none whose tensors would leave the headroom if all that it lacked was in the allocator's
    free blocks: of larger shares these may be fewer.
    Where splits are too many to list, those listed and those beneath failures may all be ruled out: then what failed
    with some samples moved to another device is tried, until no failure leaves any open.
    """

    def propose(self, state: SearchState) -> Proposal | None:
        if state.any_fits:
            return None
        table = self._likeliest(self._left(state), state)
        if not len(table):
            return None
        accumulating = table.where(table.steps > 1)
        if len(accumulating):
            which = "the smallest that likeliest fits" if state.any_ran else "the smallest split left"
            reason = f"nothing fitted so far: {which}"
            split = accumulating.split(self._smallest(accumulating, state))
            return Proposal(split=split, kind="smallest left", reason=reason)
        reason = "nothing fits that accumulates: the whole batch at once"
        if state.any_ran:
            reason = "nothing fitted so far: the whole batch at once likeliest fits"
            burdens = self._burdens(table, state)
            table = table.where(burdens <= burdens.min())
        split = table.split(self._furthest_from_failures(table, state))
        return Proposal(split=split, kind="whole batch", reason=reason)

    @staticmethod
    def _left(state: SearchState) -> SplitTable:
        """Splits that are neither measured nor ruled out."""
        table = state.tables.listed
        if state.space.shares == "each":
            table = concatenate(table, singles_table(state.space), _beneath_failures(state))
        if state.scores is not None:
            table = concatenate(table, state.scores.table)
        left = table.where(_is_left(table, state))
        if not len(left) and not state.tables.is_complete:
            table = concatenate(*(neighbours(t.split, state.space.min_shard_size) for t in state.trials))
            left = table.where(_is_left(table, state))
        return left

    @staticmethod
    def _likeliest(table: SplitTable, state: SearchState) -> SplitTable:
        """The rows that likeliest fit, by what was held in the trials that ran; all where nothing tells them apart."""
        chances = state.memory.needed(table.steps, table.shards).chance_below(state.limits)
        return table.where(chances >= chances.max(initial=0.0))

    @staticmethod
    def _smallest(table: SplitTable, state: SearchState) -> int:
        """The row of the smallest micro-batch; of those the one with least on the devices that failed."""
        burdens = SmallestLeft._burdens(table, state)
        return int(np.lexsort((-table.steps, burdens, table.micro_batch_sizes))[0])

    @staticmethod
    def _burdens(table: SplitTable, state: SearchState) -> FloatArray:
        """(N,) samples on the devices that likely lacked memory."""
        suspects = sorted({device for trial in state.trials for device in trial.likely_oom_devices})
        return np.asarray(table.shards[:, suspects].sum(axis=1))

    @staticmethod
    def _furthest_from_failures(table: SplitTable, state: SearchState) -> int:
        """The row whose largest part of what a device failed with is smallest.

        Worked: GPU 0 failed with 5 samples and GPU 1 with 4. Of (4, 3, 4) and (3, 3, 5), with parts of 4 / 5 and
        3 / 4, the second is next. Where no failure tells its device, it may have been too much for GPU 0, or too
        much left to the others: GPU 0's share is furthest from those that failed. Example: of 64 samples on 3
        devices 21, 43, 10.
        """
        failed = [trial for trial in state.trials if trial.split.accumulation_steps == 1]
        if failed and not any(trial.oom_devices or trial.measurement.memory for trial in failed):
            ends = [-1, state.space.global_batch_size + 1]
            gpu0 = np.array([*(trial.split.gpu0_bsz for trial in failed), *ends])
            return int(np.abs(table.shards[:, :1] - gpu0).min(axis=1).argmax())
        parts = table.shards / _least_failed(state, 1)
        return int(np.lexsort(((parts**2).sum(axis=1), parts.max(axis=1)))[0])


def _is_left(table: SplitTable, state: SearchState) -> BoolArray:
    """(N,) the rows that were not measured, and that no failure rules out but by free blocks of the allocator."""
    sure = [trial for trial in state.trials if not trial.lacks_cached]
    if len(sure) == len(state.trials):
        return open_rows(table, sure)
    measured = table.is_any_of([trial.split for trial in state.trials])
    may_keep = (state.memory.needed(table.steps, table.shards).least <= state.limits).all(axis=1)
    return open_rows(table, state.trials) | (open_rows(table, sure) & ~measured & may_keep)


def _beneath_failures(state: SearchState) -> SplitTable:
    """For each size of the micro-batch, shares in proportion to the most that no failure speaks against.

    Worked: of 61 samples all failed on the last of 4 devices, and 12 on each other one. 11, 11, 11 and 60 are left,
    and 7, 7, 8 and 39 are in proportion.
    """
    space, rows = state.space, []
    for steps, size in micro_batches(space):
        left = [int(least) - 1 for least in _least_failed(state, steps)]
        shards = share_out(size, left)
        if sum(left) >= size and min(shards) >= space.min_shard_size:
            rows.append((steps, *shards))
    found = np.array(rows, dtype=float).reshape(-1, 1 + space.num_devices)
    return SplitTable(global_batch_size=space.global_batch_size, steps=found[:, 0], shards=found[:, 1:])


def _least_failed(state: SearchState, steps: int) -> FloatArray:
    """(n,) the fewest samples, at least 1, with which each device likely ran out of memory.

    Where it never did, one more than there are. A failure with several steps says nothing of a single one.
    """
    least = np.full(state.space.num_devices, state.space.global_batch_size + 1.0)
    for trial in state.trials:
        if steps > 1 or trial.split.accumulation_steps == 1:
            for device in trial.likely_oom_devices:
                least[device] = min(least[device], max(trial.split.shard_sizes[device], 1))
    return least
