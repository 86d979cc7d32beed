"""Any Optuna sampler, filtered: the baseline first, then only splits that are new and may fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from splittune.search.candidates.table import even_table, listed_table, open_rows
from splittune.search.judged_trials import JudgedTrial, known_infeasible
from splittune.search.policies.baseline import bisect_baseline
from splittune.search.samplers.base import SplitSampler
from splittune.search.samplers.parameters import distributions_of, split_of
from splittune.search.storage.records import read_judged_trials

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, TrialState

    from splittune.search.result import Stopped
    from splittune.split import BatchSplit, SplitSpace


class FilteredSampler(SplitSampler):
    """Any Optuna sampler, kept to splits worth measuring.

    The even splits that find the baseline come first. Then `inner` proposes. A split that was
    measured, or that a failure has ruled out, is replaced by the nearest open one: similar
    accumulation steps if possible, then the least different shards.

    Args:
        space: the legal splits.
        make_inner: gives the sampler for every proposal, from the number of finished trials. A
            sampler with a random state of its own can be seeded anew each time, so that a resumed
            search goes on as an uninterrupted one would.
    """

    def __init__(self, space: SplitSpace, make_inner: Callable[[int], BaseSampler]) -> None:
        super().__init__(space)
        self._make_inner = make_inner
        self._inner = make_inner(0)
        self._evens = even_table(space).splits()
        self._listed = listed_table(space)

    def why_stop(self, trials: Sequence[JudgedTrial]) -> Stopped | None:
        """The search is over when no listed split is open any more."""
        return None if open_rows(self._listed, trials).any() else "space exhausted"

    def warnings(self, trials: Sequence[JudgedTrial]) -> tuple[str, ...]:
        """None: no model is behind these proposals."""
        return ()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._inner = self._make_inner(len(read_judged_trials(study)))
        self._inner.before_trial(study, trial)

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> BatchSplit:
        trials = read_judged_trials(study)
        even = bisect_baseline(self._evens, trials)
        if even is not None:
            self.reason = even.reason
            return even.split
        wanted = split_of(self.space, self._ask_inner(study, trial))
        nearest = self._open_near(wanted, trials)
        self.reason = f"proposed by {type(self._inner).__name__}"
        if nearest != wanted:
            self.reason += f"; nearest open one to {wanted}"
        return nearest

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        try:
            self._inner.after_trial(study, trial, state, values)
        except RuntimeError as error:
            # A sampler that has seen its whole grid stops the study, which Optuna refuses outside
            # optimize(). Here the search goes on with the splits that are left.
            if "Study.stop" not in str(error):
                raise

    def reseed_rng(self) -> None:
        self._inner.reseed_rng()

    def _ask_inner(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """What the inner sampler makes of each parameter, all at once where it can."""
        inner, params = self._inner, {}
        relative = inner.infer_relative_search_space(study, trial)
        if relative:
            params = inner.sample_relative(study, trial, relative)
        # `before_trial` has noted something since `trial` was read
        latest = study.get_trials(deepcopy=False)[trial.number]
        for name, distribution in distributions_of(self.space).items():
            if name not in params:
                params[name] = inner.sample_independent(study, latest, name, distribution)
        return params

    def _open_near(self, wanted: BatchSplit, trials: Sequence[JudgedTrial]) -> BatchSplit:
        """`wanted` if it is open or nothing is, else the nearest that is open."""
        if not any(trial.split == wanted for trial in trials) and not known_infeasible(wanted, trials):
            return wanted
        table = self._listed.where(open_rows(self._listed, trials))
        if not len(table):
            return wanted
        steps_apart = np.abs(np.log(table.steps / wanted.accumulation_steps))
        shards_apart = np.abs(table.shards - np.array(wanted.shard_sizes, dtype=float)).sum(axis=1)
        return table.split(int(np.lexsort((shards_apart, steps_apart))[0]))
