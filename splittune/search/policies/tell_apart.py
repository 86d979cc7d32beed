"""Which kind of device is how fast, where no trial says how long each one worked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.table import micro_batches
from splittune.search.policies.base import Proposal, SearchState
from splittune.split import BatchSplit, even_shards


@dataclass(frozen=True, slots=True)
class TellApart:
    """Each kind of device by itself, at the share that it had in the largest even split that fits.

    A step takes as long as its slowest device, so without busy times splits over all devices show
    one kind alone, and shares cannot be balanced. Kinds are as `kinds_of` tells them. Example: 4
    devices of 24 GiB and 2 of 16 GiB that fit 8 samples each are measured at 32 samples on the
    four, and at 16 on the two.
    """

    def propose(self, state: SearchState) -> Proposal | None:
        space = state.space
        if space.min_shard_size or space.num_devices == 1 or not state.any_fits or state.time.tells_busy:
            return None
        kinds = state.kinds
        share = max(min(trial.split.shard_sizes) for trial in state.trials if trial.fits)
        if kinds is None or len(set(kinds)) == 1 or not share:
            return None
        alone = {self._kind_alone(trial.split, kinds) for trial in state.trials if trial.ran}
        for kind in sorted(set(kinds) - alone):
            devices = [i for i, other in enumerate(kinds) if other == kind]
            fitting = [(k, m) for k, m in micro_batches(space) if m <= share * len(devices)]
            if not fitting:
                continue
            steps, size = fitting[0]
            shards = np.zeros(space.num_devices, dtype=int)
            shards[devices] = even_shards(size, len(devices))
            split = BatchSplit(
                global_batch_size=space.global_batch_size, accumulation_steps=steps, shard_sizes=tuple(shards.tolist())
            )
            names = ", ".join(f"GPU {device}" for device in devices)
            if any(trial.split == split or trial.rules_out(split) for trial in state.trials):
                continue
            return Proposal(split=split, kind="tell apart", reason=f"{names} alone: how fast is that kind?")
        return None

    @staticmethod
    def _kind_alone(split: BatchSplit, kinds: tuple[int, ...]) -> int | None:
        """The only kind that had a share; None where several had."""
        took_part = {kind for kind, shard in zip(kinds, split.shard_sizes, strict=True) if shard}
        return took_part.pop() if len(took_part) == 1 else None
