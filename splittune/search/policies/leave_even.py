"""A split that is not even, where nothing else asked for one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.judged_trials import best_trial
from splittune.search.policies.base import Proposal, SearchState
from splittune.split import BatchSplit


@dataclass(frozen=True, slots=True)
class LeaveEven:
    """A part of GPU 0's share given to the others, while every trial was even.

    Even splits cannot tell what grows with GPU 0's share from what grows with the whole micro-batch,
    so a model of them alone may hold the even split for the best. Example: 18 samples on each of two
    devices are followed by 14 and 22.
    """

    moved: float = 0.25
    """The part of GPU 0's share that is given away. A choice: enough to be seen beside noise."""

    def propose(self, state: SearchState) -> Proposal | None:
        best = best_trial(state.trials)
        if best is None or best.split.num_devices == 1:
            return None
        if any(np.ptp(trial.split.shard_sizes) > 1 for trial in state.trials if trial.ran):
            return None
        share = best.split.gpu0_bsz
        if share < 2:  # all of it would go
            return None
        split = BatchSplit.with_gpu0(
            global_batch_size=best.split.global_batch_size,
            accumulation_steps=best.split.accumulation_steps,
            num_devices=best.split.num_devices,
            gpu0_bsz=share - max(1, int(self.moved * share)),
        )
        # every device may have to have more
        if split not in state.space or any(trial.split == split or trial.rules_out(split) for trial in state.trials):
            return None
        steps, shards = np.array([float(split.accumulation_steps)]), np.array([split.shard_sizes], dtype=float)
        if (state.memory.needed(steps, shards).most > state.limits).any():
            return None
        return Proposal(split=split, kind="leave even", reason="all were even: GPU 0 with less")
