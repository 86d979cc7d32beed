from __future__ import annotations

from dataclasses import replace

from splittune.search.policies.proposer import Proposer
from splittune.search.policies.start_small import StartSmall
from tests.search.policies.story import state_after
from tests.search.problem import even, job


def test_begins_with_the_smallest_even_split() -> None:
    """The first trial has a sample for each card, so that what does not fit there fits nowhere evenly."""
    proposal = StartSmall().propose(state_after(job(4, B=64)))
    assert proposal is not None
    assert (proposal.split, proposal.kind) == (even(64, 16, 4), "start")


def test_the_least_share_demanded_is_the_smallest() -> None:
    """With `min_shard_size` 3 the first trial has 3 samples for each card."""
    proposal = Proposer(replace(job(4, B=64).space(), min_shard_size=3), (0,) * 4).propose([])
    assert proposal is not None
    assert (proposal.split, proposal.kind) == (even(64, 5, 4), "start")


def test_it_wants_only_the_first_trial() -> None:
    """Whatever became of it, the next trial is for other policies."""
    problem = job(4, B=64)
    assert StartSmall().propose(state_after(problem, [even(64, 16, 4)])) is None
