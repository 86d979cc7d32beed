from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.search.policies.base import Policy, Proposal, ProposalKind, SearchState
from splittune.search.policies.proposer import POLICIES, Proposer, propose
from tests.search.jobs import JOBS
from tests.search.policies.story import search, state_after
from tests.search.problem import Job, card_memory, even, job, trial


class Wants(Policy):
    """Wants the same split every time, or nothing."""

    def __init__(self, kind: ProposalKind | None) -> None:
        self.kind = kind

    def propose(self, state: SearchState) -> Proposal | None:
        return None if self.kind is None else Proposal(split=even(8, 1, 2), kind=self.kind, reason="")


def test_the_first_policy_that_wants_a_trial_decides() -> None:
    """Those before it want none, those behind it are not asked; where none wants one there is no proposal."""
    state = state_after(job(2, B=8))
    proposal = propose(state, (Wants(None), Wants("baseline"), Wants("risky")))
    assert proposal is not None
    assert proposal.kind == "baseline"
    assert propose(state, (Wants(None), Wants(None))) is None


def test_it_depends_on_the_trials_alone() -> None:
    """A fresh proposer proposes after any number of trials what the one that made them did."""
    problem = job([card_memory(is_first=True, sample=30, total=1500), *[card_memory(sample=30)] * 2], B=96)
    proposals, trials = search(problem)
    for place, proposal in enumerate(proposals):
        assert Proposer(problem.space(), problem.min_headroom_bytes).propose(trials[:place]) == proposal
    assert Proposer(problem.space(), problem.min_headroom_bytes).propose(trials) is None


@pytest.mark.parametrize("name", list(JOBS)[::4])
def test_every_proposal_says_what_it_is_for_and_why(name: str) -> None:
    """A kind that code can read, and a reason in one line for people; the first is the start."""
    proposals, _ = search(JOBS[name](), most=12)
    assert proposals[0].kind == "start"
    assert {one.kind for one in proposals} <= set(get_args(ProposalKind))
    assert all(one.reason and "\n" not in one.reason for one in proposals)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, int]:
    """A small job, and the least that each card must have of a micro-batch."""
    n = draw(st.integers(1, 5))
    least = draw(st.integers(0, 3))
    sample = draw(st.sampled_from([10, 100, 600]))
    totals = [draw(st.sampled_from([2000, 4000])) for _ in range(n)]
    problem = job(
        [card_memory(is_first=i == 0, sample=sample, total=total) for i, total in enumerate(totals)],
        B=draw(st.integers(max(1, n * least), 90)),
        shares=draw(st.sampled_from(["gpu0", "each"])),
        tells_busy=draw(st.booleans()),
    )
    return replace(problem, tells_all=draw(st.booleans())), least


@given(jobs())
@settings(max_examples=60)
def test_no_proposal_is_illegal_or_was_measured(drawn: tuple[Job, int]) -> None:
    """Whatever is told and whatever every card must have."""
    problem, least = drawn
    space = replace(problem.space(), min_shard_size=least)
    proposer, trials = Proposer(space, problem.min_headroom_bytes), []
    while len(trials) < 12 and (proposal := proposer.propose(trials)) is not None:
        assert proposal.split in space
        assert proposal.split not in [one.split for one in trials]
        trials.append(trial(problem, proposal.split, problem.min_headroom_bytes))
    assert trials


def test_the_baseline_comes_before_what_may_be_faster() -> None:
    """Where both want a trial: larger even splits tell what fits beyond, and are what the result is compared with."""
    problem = job([card_memory(is_first=True, sample=30, total=600), card_memory(sample=30, total=600)], B=400)
    baseline, improve = POLICIES[1], POLICIES[3]
    wanted: list[tuple[ProposalKind | None, ProposalKind | None, ProposalKind]] = []
    trials: list[JudgedTrial] = []
    for proposal in search(problem)[0]:
        state = state_after(problem, trials)
        told = [own and own.kind for own in (improve.propose(state), baseline.propose(state))]
        wanted.append((told[0], told[1], proposal.kind))
        trials.append(trial(problem, proposal.split, problem.min_headroom_bytes))
    assert ("improve", "baseline", "baseline") in wanted


def test_a_crash_is_left_alone() -> None:
    """A split that crashed is not proposed again, and says nothing of memory."""
    problem = job(2, B=64)
    proposer = Proposer(problem.space(), (0, 0))
    ran = [trial(problem, even(64, k, 2), (0, 0)) for k in (32, 2)]
    proposal = proposer.propose(ran)
    assert proposal is not None
    crashed = JudgedTrial(measurement=Measurement(split=proposal.split, outcome=Outcome.CRASHED))
    after = proposer.propose([*ran, crashed])
    assert after is not None
    assert after.split != proposal.split


def test_warnings_of_both_models_are_passed_on() -> None:
    """Before anything ran there is nothing to warn of; then what either model says is heard."""
    problem = job(2, B=64)
    proposer = Proposer(problem.space(), (0, 0))
    assert proposer.warnings([]) == ()
    wild = []
    for i, k in enumerate((32, 16, 8, 4, 2)):
        one = trial(problem, even(64, k, 2), (0, 0)).measurement
        times = tuple(time * (4.0 if i % 2 else 0.5) for time in one.micro_step_times_s)
        wild.append(JudgedTrial(measurement=_with_times(one, times)))
    assert any("time model" in warning for warning in proposer.warnings(wild))


def _with_times(one: Measurement, times: tuple[float, ...]) -> Measurement:
    return Measurement(
        split=one.split,
        outcome=one.outcome,
        micro_step_times_s=times,
        update_times_s=one.update_times_s,
        memory=one.memory,
    )


def test_models_are_believed_until_a_trial_contradicts_them() -> None:
    """Three trials on a line foretell the next; one that takes twice as long is off by more than allowed for."""
    problem = job(2, B=64)
    proposer = Proposer(problem.space(), (0, 0))
    known = [trial(problem, even(64, k, 2), (0, 0)) for k in (32, 16, 8)]
    as_foretold = trial(problem, even(64, 4, 2), (0, 0))
    times = tuple(2 * time for time in as_foretold.measurement.micro_step_times_s)
    surprise = JudgedTrial(measurement=_with_times(as_foretold.measurement, times))
    assert proposer.is_believed([])
    assert proposer.is_believed([*known, as_foretold])
    assert not proposer.is_believed([*known, surprise])
