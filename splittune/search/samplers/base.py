"""What all samplers of splits share with Optuna."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler

from splittune.search.samplers.parameters import distributions_of, params_of

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from splittune.split import BatchSplit, SplitSpace


class SplitSampler(BaseSampler):
    """A sampler that chooses a whole split, and hands it to Optuna as parameters, all at once.

    Args:
        space: the legal splits.
    """

    def __init__(self, space: SplitSpace) -> None:
        self.space = space
        self.reason = ""
        """Why the latest split was chosen, for people."""

    @abstractmethod
    def choose(self, study: optuna.Study, trial: FrozenTrial) -> BatchSplit:
        """The split to measure in `trial`; sets `reason`."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions_of(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return dict(params_of(self.space, self.choose(study, trial)))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        names = ", ".join(distributions_of(self.space))
        raise ValueError(f"asked for parameter {param_name!r}: expected only {names}, by suggest_split.")
