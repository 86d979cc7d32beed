from __future__ import annotations

from dataclasses import replace

from splittune.search.policies.verify_uncertain import VerifyUncertain
from tests.search.policies.story import search, state_after
from tests.search.problem import card_memory, even, job


def test_models_that_were_wrong_are_verified_before_the_search_ends() -> None:
    """On like cards with room for all the even split is the best and nothing is left to verify; had the latest
    predictions been off by twenty deviations, there would be."""
    problem = job(4, B=96)
    _, trials = search(problem)
    state = state_after(problem, trials)
    assert VerifyUncertain().propose(state) is None
    doubted = VerifyUncertain().propose(replace(state, doubt=20.0))
    assert doubted is not None
    assert doubted.kind == "verify"
    assert doubted.split not in [one.split for one in trials]


def test_it_wants_less_with_less_optimism() -> None:
    """Its optimism is a field, and so is the gain that is worth a trial."""
    state = state_after(job(4, B=96), [even(96, 24, 4), even(96, 2, 4), even(96, 1, 4)])
    wanted = VerifyUncertain().propose(state)
    assert wanted is not None
    assert VerifyUncertain(deviations=0.0, min_gain=0.3).propose(state) is None


def test_only_what_surely_fits_is_verified() -> None:
    """A verification is no risk: each keeps its headroom and none runs out of memory."""
    problem = job([card_memory(is_first=True, sample=60, total=2000), *[card_memory(sample=60, total=3000)] * 3], B=128)
    proposals, trials = search(problem)
    assert all(one.fits for one, proposal in zip(trials, proposals, strict=True) if proposal.kind == "verify")
