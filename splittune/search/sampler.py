"""What a sampler of ours is: it proposes a candidate and says why. The two simplest."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler

from splittune.search.attempt import Attempt, is_hopeless
from splittune.search.history import PARAMETER, distribution_of, read_attempts

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from splittune.search.candidates import Candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The candidate to measure next, and why: ``"even split in 2 steps: looking for the baseline"``."""

    index: int
    reason: str


class CandidateSampler(BaseSampler):
    """A sampler that chooses among `candidates` from what was measured so far: subclasses write `propose`.

    `reason` is that of the latest proposal.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.reason = ""

    @abstractmethod
    def propose(self, attempts: Sequence[Attempt]) -> Proposal:
        """The next candidate, given all attempts, oldest first. Called only while some candidate is unmeasured."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {PARAMETER: distribution_of(self.candidates)}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        proposal = self.propose(read_attempts(study))
        self.reason = proposal.reason
        return {PARAMETER: proposal.index}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(f"asked for parameter {param_name!r}: expected only {PARAMETER!r}, an index of a candidate.")


class OrderSampler(CandidateSampler):
    """Plain order: the first candidate that is neither measured nor hopeless."""

    def propose(self, attempts: Sequence[Attempt]) -> Proposal:
        measured = {attempt.split for attempt in attempts}
        places = (
            place
            for place, split in enumerate(self.candidates)
            if split not in measured and not is_hopeless(split, attempts)
        )
        return Proposal(index=next(places, 0), reason="next in order")


class RandomSampler(CandidateSampler):
    """Any candidate, each as likely as the next.

    The draw depends on the seed and on how many trials are finished, so a resumed search goes on as it would have.
    """

    def __init__(self, candidates: Candidates, *, seed: int = 0) -> None:
        super().__init__(candidates)
        self._seed = seed

    def propose(self, attempts: Sequence[Attempt]) -> Proposal:
        draw = random.Random(f"{self._seed} {len(attempts)}")
        return Proposal(index=draw.randrange(len(self.candidates)), reason="drawn at random")
