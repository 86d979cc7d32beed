"""The guided sampler, for Optuna: learns memory and time from the first small trials, and goes where most is to gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from splittune.search.attempts import Attempt, best_attempt
from splittune.search.policies.guide import Guide, Proposal
from splittune.search.samplers.parameters import distributions_of, params_of
from splittune.search.storage.records import demand, read_attempt, read_attempts

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from splittune.search.result import Stopped
    from splittune.split import SplitSpace


class GuidedSampler(BaseSampler):
    """Proposes what `Guide` does: never a split twice, none that the memory model does not vouch for.

    It works in a study of one's own, with any storage: ask by `suggest_split`, tell by `report`, and ``study.optimize``
    ends by itself when no trial is worth its time. It depends on the finished trials alone, so that a search that goes on
    from a storage proposes what an uninterrupted one would; one process at a time.

        study = optuna.create_study(direction="maximize", sampler=GuidedSampler(space))
        study.optimize(lambda trial: report(trial, measure(suggest_split(trial, space))), n_trials=12)

    Args:
        space: the legal splits.
        min_headroom_bytes: what every device must keep free, one number or one for each.
    """

    def __init__(self, space: SplitSpace, *, min_headroom_bytes: int | Sequence[int] = 0) -> None:
        self.space = space
        self.reason = ""
        """Why the latest proposal was made."""
        if isinstance(min_headroom_bytes, int):
            min_headroom_bytes = (min_headroom_bytes,) * space.num_devices
        self.demands = tuple(min_headroom_bytes)
        self._guide = Guide(space, self.demands)
        self._latest: tuple[list[Attempt], Proposal | None] | None = None

    def why_stop(self, attempts: Sequence[Attempt]) -> Stopped | None:
        """Why no further trial is worth its time; None while one is."""
        if self._propose(attempts) is not None:
            return None
        return "converged" if self._guide.has_open(attempts) else "space exhausted"

    def warnings(self, attempts: Sequence[Attempt]) -> tuple[str, ...]:
        """What the models could not explain of the trials, in sentences; empty where they fitted."""
        return self._guide.warnings(attempts)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        demand(study, self.demands)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return distributions_of(self.space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        attempts = read_attempts(study)
        proposal = self._propose(attempts)
        if proposal is None:  # asked for more than is worth measuring: the best does no harm
            best = best_attempt(attempts) or attempts[-1]
            proposal = Proposal(split=best.split, reason="nothing is left to gain: the best once more")
        self.reason = proposal.reason
        return dict(params_of(self.space, proposal.split))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        names = ", ".join(distributions_of(self.space))
        raise ValueError(f"asked for parameter {param_name!r}: expected only {names}, by suggest_split.")

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        attempt = read_attempt(trial, self.demands) if state is not TrialState.FAIL else None
        if attempt is None or self._propose([*read_attempts(study), attempt]) is not None:
            return
        try:
            study.stop()
        except RuntimeError:  # not inside optimize(): whoever asks and tells also decides when to stop
            return

    def _propose(self, attempts: Sequence[Attempt]) -> Proposal | None:
        """What the guide proposes, worked out once."""
        if self._latest is None or self._latest[0] != list(attempts):
            self._latest = list(attempts), self._guide.propose(attempts)
        return self._latest[1]
