"""The guided sampler, for Optuna: models learn from small trials, policies choose the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optuna.trial import TrialState

from splittune.search.headroom import headroom_demands
from splittune.search.judged_trials import JudgedTrial, best_trial
from splittune.search.policies.base import Policy, Proposal
from splittune.search.policies.proposer import POLICIES, Proposer
from splittune.search.samplers.base import SplitSampler
from splittune.search.storage.records import demand, read_judged_trial, read_judged_trials

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from splittune.search.result import Stopped
    from splittune.split import BatchSplit, SplitSpace


class GuidedSampler(SplitSampler):
    """Proposes what the policies do: no split twice, and none that is likely to lack memory.

    It works in a study of one's own, with any storage. Ask by `suggest_split`, tell by `report`;
    ``study.optimize`` ends by itself when no trial is worth its time. It depends on the finished
    trials alone, so a search that goes on from a storage proposes what an uninterrupted one would.
    One process at a time may use a study.

        study = optuna.create_study(direction="maximize", sampler=GuidedSampler(space))
        study.optimize(lambda trial: report(trial, measure(suggest_split(trial, space))),
        n_trials=12)

    Args:
        space: the legal splits.
        min_headroom_bytes: what every device must keep free, one number or one for each.
        policies: what proposes, first to last; others than these are of use to judge them.
    """

    def __init__(
        self,
        space: SplitSpace,
        *,
        min_headroom_bytes: int | Sequence[int] = 0,
        policies: Sequence[Policy] = POLICIES,
    ) -> None:
        super().__init__(space)
        self.demands = headroom_demands(min_headroom_bytes, space.num_devices)
        self._proposer = Proposer(space, self.demands, policies)
        self._latest: tuple[list[JudgedTrial], Proposal | None] | None = None

    def why_stop(self, trials: Sequence[JudgedTrial]) -> Stopped | None:
        """Why no further trial is worth its time; None while one is."""
        if self._propose(trials) is not None:
            return None
        if not self._proposer.has_open(trials):
            return "space exhausted"
        return "converged" if self._proposer.is_believed(trials) else "models disagree"

    def warnings(self, trials: Sequence[JudgedTrial]) -> tuple[str, ...]:
        """What the models could not explain, in sentences; empty where they fitted."""
        return self._proposer.warnings(trials)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        demand(study, self.demands)

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> BatchSplit:
        trials = read_judged_trials(study)
        proposal = self._propose(trials)
        if proposal is None:  # asked for more than is worth measuring
            self.reason = "nothing is left to gain: the best once more"
            return (best_trial(trials) or trials[-1]).split
        self.reason = proposal.reason
        return proposal.split

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        judged = read_judged_trial(trial, self.demands) if state is not TrialState.FAIL else None
        if judged is None or self._propose([*read_judged_trials(study), judged]) is not None:
            return
        try:
            study.stop()
        except RuntimeError:  # not inside optimize(): whoever asks and tells decides when to stop
            return

    def _propose(self, trials: Sequence[JudgedTrial]) -> Proposal | None:
        """What the proposer proposes, worked out once."""
        if self._latest is None or self._latest[0] != list(trials):
            self._latest = list(trials), self._proposer.propose(trials)
        return self._latest[1]
