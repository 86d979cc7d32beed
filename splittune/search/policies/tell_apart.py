"""Which kind of device is how fast, where no trial says how long each one worked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.table import micro_batches
from splittune.search.choices import LIKELY, MOST_UNLIKE
from splittune.search.models.kinds import kind_alone, seconds_alone, separable_kinds
from splittune.search.models.step_trials import totals_of
from splittune.search.policies.base import Proposal, SearchState
from splittune.split import BatchSplit, SplitSpace, even_shards


@dataclass(frozen=True, slots=True)
class TellApart:
    """Each kind of device by itself, all at the least share of the largest even split that fits.

    A step takes as long as its slowest device, so without busy times splits over all devices show
    one kind alone, and shares cannot be balanced. Kinds are as `separable_kinds` tells them. Example: 3
    devices that fit 8, 9 and 9 samples are measured with 8 on the first, on the second, and on the third.
    Devices that must have a share get the least. Where one cannot hold what that leaves of a batch, those with as much
    memory are measured together: they likely are one model. Example: of 38 samples each of 8 devices must have 2, and
    none holds the 24 that are left; five with as much memory have 7, 7, 6, 6 and 6.
    """

    def propose(self, state: SearchState) -> Proposal | None:
        space, kinds = state.space, separable_kinds(state.space, state.trials)
        if space.num_devices == 1 or not state.any_fits or state.time.tells_busy:
            return None
        if kinds is None or len(set(kinds)) == 1:
            return None
        least = max(1, MOST_UNLIKE * space.min_shard_size)
        share = max(least, *(min(trial.split.shard_sizes) for trial in state.trials if trial.fits))
        sizes = totals_of(next(trial.measurement for trial in state.trials if trial.ran))
        told: set[int] = set()
        for numbers in (kinds, sizes) if space.shares == "each" else (kinds,):
            alone = seconds_alone(numbers, state.trials)
            told |= {device for device, kind in enumerate(numbers) if alone[kind]}
            for kind in sorted(set(numbers) - {numbers[device] for device in told}):
                split = self._alone(space, numbers, kind, share)
                if split is None or split not in space or not self._may_run(state, split):
                    continue
                names = ", ".join(f"GPU {device}" for device, other in enumerate(numbers) if other == kind)
                return Proposal(split=split, kind="tell apart", reason=f"{names} alone: how fast is that kind?")
        return None

    @staticmethod
    def _may_run(state: SearchState, split: BatchSplit) -> bool:
        """Whether it is open, and likely fits."""
        if any(trial.split == split or trial.rules_out(split) for trial in state.trials):
            return False
        shards = np.array([split.shard_sizes], dtype=float)
        needed = state.memory.needed(np.array([float(split.accumulation_steps)]), shards)
        return bool(needed.chance_below(state.limits)[0] >= LIKELY)

    @staticmethod
    def _alone(space: SplitSpace, kinds: Sequence[int], kind: int, share: int) -> BatchSplit | None:
        """The devices of `kind` with some `share` samples each, the others with the least; None where none is alone.

        Up to `share` where such a micro-batch is legal, else as little more as is.
        """
        least, devices = space.min_shard_size, np.flatnonzero(np.array(kinds) == kind)
        rest = least * (space.num_devices - len(devices))
        most = share * len(devices) + rest
        for steps, size in sorted(micro_batches(space), key=lambda pair: (pair[1] > most, abs(pair[1] - most))):
            if size < least * space.num_devices:
                continue
            shards = np.full(space.num_devices, least)
            shards[devices] = even_shards(size - rest, len(devices))
            if kind_alone(shards.tolist(), kinds) != kind:
                continue
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
        return None
