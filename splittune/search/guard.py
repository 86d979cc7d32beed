"""The guard around a sampler: the baseline first, then only splits that are new and not hopeless."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler

from splittune.search.attempt import Attempt, next_for_baseline
from splittune.search.history import PARAMETER, distribution_of
from splittune.search.sampler import CandidateSampler

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState

    from splittune.search.candidates import Candidates
    from splittune.split import BatchSplit


class GuardedSampler(BaseSampler):
    """Any sampler, kept to splits worth measuring.

    The even splits that find the baseline come first. Then `inner` proposes; a candidate that was measured, or that a
    failure has ruled out, is replaced by the nearest that is open: same accumulation steps if possible, then the
    least different shards. `reason` says why the latest proposal was made. `make_inner` is called for every proposal
    with the number of finished trials: a sampler with a random state of its own can be seeded anew each time, so that
    a resumed search goes on as an uninterrupted one would.
    """

    def __init__(self, candidates: Candidates, make_inner: Callable[[int], BaseSampler]) -> None:
        self._candidates = candidates
        self._make_inner = make_inner
        self._inner = make_inner(0)
        self._open = {steps: list(candidates.at(steps)) for steps in candidates.steps}
        self._attempts: list[Attempt] = []
        self.reason = ""

    @property
    def is_exhausted(self) -> bool:
        """True when every candidate is measured or ruled out."""
        return not any(self._open.values())

    def observe(self, attempt: Attempt) -> None:
        """Close the candidates this attempt measured or ruled out."""
        self._attempts.append(attempt)
        for steps, indices in self._open.items():
            if steps == attempt.split.accumulation_steps or attempt.lacks_memory:
                splits = ((index, self._candidates[index]) for index in indices)
                self._open[steps] = [
                    i for i, split in splits if split != attempt.split and not attempt.rules_out(split)
                ]

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._inner = self._make_inner(len(self._attempts))
        self._inner.before_trial(study, trial)
        self.reason = "the only candidate"  # which Optuna takes without asking

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        if self._next_even() is not None:
            return {PARAMETER: distribution_of(self._candidates)}
        return self._inner.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        even = self._next_even()
        if even is not None:
            self.reason = f"even split at k={even.accumulation_steps}: looking for the baseline"
            return {PARAMETER: self._candidates.index(even)}
        params = self._inner.sample_relative(study, trial, search_space)
        if PARAMETER in params:
            params[PARAMETER] = self._open_near(int(params[PARAMETER]))
        return params

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._open_near(int(self._inner.sample_independent(study, trial, param_name, param_distribution)))

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        try:
            self._inner.after_trial(study, trial, state, values)
        except RuntimeError as error:
            # A sampler that has seen its whole grid stops the study, which Optuna refuses outside optimize(). Here the
            # search goes on with the candidates that are left.
            if "Study.stop" not in str(error):
                raise

    def reseed_rng(self) -> None:
        self._inner.reseed_rng()

    def _next_even(self) -> BatchSplit | None:
        return next_for_baseline(self._candidates.even_splits, self._attempts)

    def _open_near(self, index: int) -> int:
        """`index` if it is open, else the nearest that is."""
        inner, wanted = self._inner, self._candidates[index]
        self.reason = inner.reason if isinstance(inner, CandidateSampler) else f"proposed by {inner}"
        if index in self._open[wanted.accumulation_steps]:
            return index
        by_distance = sorted(self._open, key=lambda steps: (abs(steps - wanted.accumulation_steps), steps))
        indices = next(self._open[steps] for steps in by_distance if self._open[steps])
        nearest = self._candidates.nearest(wanted.shard_sizes, indices)
        assert nearest is not None
        self.reason += f"; nearest open one to {wanted}"
        return nearest
