"""The first trial."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class StartSmall:
    """The smallest even split comes first: what does not fit there fits nowhere evenly."""

    def propose(self, state: SearchState) -> Proposal | None:
        if state.trials:
            return None
        evens = state.tables.evens
        table = evens if len(evens) else state.tables.listed
        one_each = state.space.num_devices * max(1, state.space.min_shard_size)
        # the fewest steps with a sample for each device; a smaller micro-batch would leave devices
        # idle
        is_small = table.micro_batch_sizes <= max(one_each, table.micro_batch_sizes.min())
        row = int(np.flatnonzero(is_small)[0])
        return Proposal(split=table.split(row), kind="start", reason="the smallest even split: a safe start")
