from __future__ import annotations

import pytest

from splittune.search.policies.leave_even import LeaveEven
from splittune.split import BatchSplit
from tests.search.policies.story import of_kind, search, state_after
from tests.search.problem import card_memory, even, job, split


def test_a_quarter_of_gpu_0_goes_to_the_others() -> None:
    """18 samples on each of two devices are followed by 14 and 22; once a split was uneven nothing is asked."""
    problem = job(2, B=36)
    wanted = LeaveEven().propose(state_after(problem, [even(36, 6, 2), even(36, 1, 2)]))
    assert wanted is not None
    assert wanted.split == split(36, 1, 14, 22)
    assert LeaveEven().propose(state_after(problem, [even(36, 1, 2), wanted.split])) is None


@pytest.mark.parametrize("B", [50, 51, 53])
def test_other_cards_are_given_what_a_split_by_gpu0_gives_them(B: int) -> None:
    """Extra samples stand where every listed split has them: a split that no list knows would be proposed for ever."""
    problem = job(4, B=B)
    wanted = LeaveEven().propose(state_after(problem, [even(B, 6, 4), even(B, 2, 4)]))
    assert wanted is not None
    assert wanted.split == BatchSplit.with_gpu0(
        global_batch_size=B, accumulation_steps=2, num_devices=4, gpu0_bsz=wanted.split.gpu0_bsz
    )


def test_shares_that_differ_by_a_sample_are_even() -> None:
    """Of 37 samples one card has 19, the other 18."""
    problem = job(2, B=37)
    assert LeaveEven().propose(state_after(problem, [even(37, 1, 2)])) is not None


def test_nothing_is_moved_that_does_not_surely_fit() -> None:
    """The others are full, GPU 0 has no sample to give, there is no other, or nothing fitted."""
    full = job([card_memory(is_first=True, sample=60, total=9000), card_memory(sample=60, total=1600)], B=76)
    tried = [even(76, 38, 2), even(76, 4, 2), even(76, 2, 2)]
    assert LeaveEven().propose(state_after(full, tried[:2])) is not None
    assert LeaveEven().propose(state_after(full, tried)) is None
    assert LeaveEven().propose(state_after(job(2, B=8), [split(8, 8, 0, 1)])) is None
    assert LeaveEven().propose(state_after(job(1, B=8), [even(8, 1, 1)])) is None
    assert LeaveEven().propose(state_after(job(2, B=8))) is None


def test_a_search_never_ends_with_even_splits_alone() -> None:
    """Where the even split is the best, one other is measured all the same."""
    proposals, trials = search(job(2, B=96))
    assert any(max(one.split.shard_sizes) - min(one.split.shard_sizes) > 1 for one in trials)
    assert len(of_kind("leave even", proposals)) <= 1
