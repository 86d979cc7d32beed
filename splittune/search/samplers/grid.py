"""A sampler that covers the space evenly, coarse at first and ever finer, blind to measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splittune.search.candidates.table import listed_table
from splittune.search.samplers.base import SplitSampler
from splittune.search.storage.records import read_judged_trials

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from splittune.split import BatchSplit, SplitSpace


class GridSampler(SplitSampler):
    """The listed splits, halving the gaps between them: of 8 in a row 0, 4, 2, 6, 1, 5, 3, 7."""

    def __init__(self, space: SplitSpace) -> None:
        super().__init__(space)
        self._table = listed_table(space)
        digits = max(1, (len(self._table) - 1).bit_length())
        self._order = sorted(range(len(self._table)), key=lambda row: int(f"{row:0{digits}b}"[::-1], 2))

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> BatchSplit:
        measured = {judged.split for judged in read_judged_trials(study)}
        splits = (self._table.split(row) for row in self._order)
        return next((split for split in splits if split not in measured), self._table.split(0))
