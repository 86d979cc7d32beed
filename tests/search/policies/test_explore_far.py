from __future__ import annotations

import pytest

from splittune.search.policies.explore_far import ExploreFar
from tests.search.policies.story import best_of, of_kind, search, state_after
from tests.search.problem import CardTime, card_memory, even, job


@pytest.mark.parametrize("starts_at", [66, 68, 70])
def test_a_faster_kernel_beyond_all_that_was_measured_is_found(starts_at: int) -> None:
    """Nothing foretells that larger shares than the even split's take less time; one is tried while
    there are trials to spare."""
    times = [CardTime(launch_s=0.02, sample_s=0.002, switch_at=starts_at, switch_factor=0.85)] * 4
    problem = job(4, B=256, times=times, micro_step_s=0.02)
    assert problem.best_throughput is not None
    assert problem.throughput(even(256, 1, 4)) < 0.95 * problem.best_throughput
    proposals, trials = search(problem, most=12)
    assert of_kind("explore far", proposals)
    assert best_of(problem, trials) > 0.98


def test_a_faster_kernel_is_found_on_cards_of_every_share_of_their_own_too() -> None:
    """From 98 samples on cards are faster, and the even split's 91 do not tell: two cards are given
    more, GPU 0 what is left."""
    times = [CardTime(launch_s=0.75, sample_s=0.006, switch_at=98, switch_factor=0.9)] * 3
    memories = [card_memory(is_first=True, sample=100, total=9_900), *[card_memory(sample=100, total=11_500)] * 2]
    problem = job(memories, B=1904, times=times, shares="each")
    assert problem.best_throughput is not None
    assert problem.throughput(even(1904, 7, 3)) < 0.95 * problem.best_throughput
    proposals, trials = search(problem, most=12)
    assert of_kind("explore far", proposals)
    assert best_of(problem, trials) > 0.98


def test_it_goes_where_no_trial_was_and_only_with_trials_to_spare() -> None:
    """After small and even shares the largest are furthest; with no trial left to spare none is proposed."""
    problem = job(4, B=256)
    state = state_after(problem, [even(256, 64, 4), even(256, 2, 4), even(256, 1, 4)])
    wanted = ExploreFar().propose(state)
    assert wanted is not None
    assert max(wanted.split.shard_sizes) > 64
    assert ExploreFar(max_trials=3).propose(state) is None
    assert ExploreFar(min_worth=1.0).propose(state) is None
