"""Tiny spaces are measured whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splittune.search.candidates.table import open_rows
from splittune.search.policies.base import Proposal, SearchState


@dataclass(frozen=True, slots=True)
class MeasureAll:
    """In a tiny space every split that is not sure to lack memory, smallest first."""

    def propose(self, state: SearchState) -> Proposal | None:
        if not state.tables.is_tiny or not state.any_ran:
            return None
        listed = state.tables.listed
        table = listed.where(open_rows(listed, state.trials))
        if len(table):
            least = state.memory.needed(table.steps, table.shards).least
            table = table.where(np.asarray((least <= state.limits).all(axis=1)))
        if not len(table):
            return None
        row = int(np.lexsort((table.micro_batch_sizes, table.shards.max(axis=1)))[0])
        reason = f"one of {len(listed)} splits, all of which are measured"
        return Proposal(split=table.split(row), kind="measure all", reason=reason)
