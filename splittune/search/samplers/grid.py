"""A sampler that covers the space evenly, coarse at first and ever finer, whatever the measurements say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler

from splittune.search.candidates.table import listed_table
from splittune.search.samplers.parameters import distributions_of, params_of
from splittune.search.storage.records import read_attempts

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from splittune.split import SplitSpace


class GridSampler(BaseSampler):
    """The listed splits of `space`, halving the gaps between them: of 8 in a row 0, 4, 2, 6, 1, 5, 3, 7."""

    def __init__(self, space: SplitSpace) -> None:
        self._space = space
        self._table = listed_table(space)
        digits = max(1, (len(self._table) - 1).bit_length())
        self._order = sorted(range(len(self._table)), key=lambda row: int(f"{row:0{digits}b}"[::-1], 2))

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions_of(self._space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        measured = {attempt.split for attempt in read_attempts(study)}
        splits = (self._table.split(row) for row in self._order)
        split = next((split for split in splits if split not in measured), self._table.split(0))
        return params_of(self._space, split)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(
            f"asked for parameter {param_name!r}: expected only {', '.join(distributions_of(self._space))}."
        )
