"""Which kind of device is how fast, where no trial says how long each one worked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.table import micro_batches
from splittune.search.policies.base import TIMES_OTHERS, Proposal, SearchState, kind_alone, separable_kinds
from splittune.split import BatchSplit, SplitSpace, even_shards


@dataclass(frozen=True, slots=True)
class TellApart:
    """Each kind of device by itself, at the share that it had in the largest even split that fits.

    A step takes as long as its slowest device, so without busy times splits over all devices show
    one kind alone, and shares cannot be balanced. Kinds are as `separable_kinds` tells them. Example: 3
    devices that fit 8 samples each are measured with 8 on the first, on the second, and on the third.
    Devices that must have a share get the least.
    """

    def propose(self, state: SearchState) -> Proposal | None:
        space, kinds = state.space, separable_kinds(state.space, state.trials)
        if space.num_devices == 1 or not state.any_fits or state.time.tells_busy:
            return None
        if kinds is None or len(set(kinds)) == 1:
            return None
        known = {kind_alone(trial.split, kinds) for trial in state.trials if trial.ran}
        for kind in sorted(set(kinds) - known):
            devices = [i for i, other in enumerate(kinds) if other == kind]
            share = max(min(trial.split.shard_sizes[i] for i in devices) for trial in state.trials if trial.fits)
            enough = share >= max(1, TIMES_OTHERS * space.min_shard_size)
            split = self._alone(space, devices, share) if enough else None
            if split is None or split not in space:
                continue
            if any(trial.split == split or trial.rules_out(split) for trial in state.trials):
                continue
            names = ", ".join(f"GPU {device}" for device, other in enumerate(kinds) if other == kind)
            return Proposal(split=split, kind="tell apart", reason=f"{names} alone: how fast is that kind?")
        return None

    @staticmethod
    def _alone(space: SplitSpace, devices: list[int], share: int) -> BatchSplit | None:
        """`devices` with up to `share` samples each, the others with the least; None without such a micro-batch."""
        shards = np.full(space.num_devices, space.min_shard_size)
        shards[devices] = 0
        rest = int(shards.sum())
        fitting = [(k, m) for k, m in micro_batches(space) if m <= share * len(devices) + rest]
        if not fitting:
            return None
        steps, size = fitting[0]
        shards[devices] = even_shards(size - rest, len(devices))
        if shards.min() < space.min_shard_size:
            return None
        if space.shares == "gpu0":  # where extra samples have their places
            return BatchSplit.with_gpu0(
                global_batch_size=space.global_batch_size,
                accumulation_steps=steps,
                num_devices=space.num_devices,
                gpu0_bsz=int(shards[0]),
            )
        return BatchSplit(
            global_batch_size=space.global_batch_size, accumulation_steps=steps, shard_sizes=tuple(shards.tolist())
        )
