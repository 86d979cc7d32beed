"""What the policies make of a job: a whole search, or the state after some trials."""

from __future__ import annotations

from collections.abc import Sequence

from splittune.search.judged_trials import JudgedTrial
from splittune.search.policies.base import Proposal, ProposalKind, SearchState
from splittune.search.policies.proposer import Proposer
from splittune.split import BatchSplit
from tests.search.problem import Job, trial


def search(problem: Job, most: int = 30) -> tuple[list[Proposal], list[JudgedTrial]]:
    """What is proposed until no policy wants a trial, and what became of it."""
    proposer = Proposer(problem.space(), problem.min_headroom_bytes)
    proposals: list[Proposal] = []
    trials: list[JudgedTrial] = []
    while len(trials) < most and (proposal := proposer.propose(trials)) is not None:
        proposals.append(proposal)
        trials.append(trial(problem, proposal.split, problem.min_headroom_bytes))
    return proposals, trials


def state_after(problem: Job, tried: Sequence[BatchSplit | JudgedTrial] = ()) -> SearchState:
    """What a policy sees after these trials; splits are measured first."""
    demands = problem.min_headroom_bytes
    trials = [one if isinstance(one, JudgedTrial) else trial(problem, one, demands) for one in tried]
    return Proposer(problem.space(), demands).state(trials)


def of_kind(kind: ProposalKind, proposals: Sequence[Proposal]) -> list[Proposal]:
    return [one for one in proposals if one.kind == kind]


def best_of(problem: Job, trials: Sequence[JudgedTrial]) -> float:
    """The fastest of the splits that fitted, as a part of the best there is; noise left out."""
    assert problem.best_throughput is not None
    return max((problem.throughput(one.split) for one in trials if one.fits), default=0.0) / problem.best_throughput
