from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from splittune.search.candidates.table import SplitTable
from splittune.search.policies.base import MAX_GROWTH
from tests.search.policies.story import best_of, search, state_after
from tests.search.problem import CardTime, Job, card_memory, even, job, split


def test_shares_do_not_leap() -> None:
    """Whatever memory promises, no share is more than so many times the largest that ran."""
    proposals, _ = search(job(2, B=4096))
    largest = 1
    for proposal in proposals:
        assert max(proposal.split.shard_sizes) <= MAX_GROWTH * largest
        largest = max(largest, *proposal.split.shard_sizes)
    assert largest >= 2048


def test_a_first_share_is_untold_and_on_gpu0_what_is_more_than_the_only_one() -> None:
    """Replicas are told by one another; that GPU 0 had none tells nothing, and two different shares do."""
    problem = job(4, B=12)
    wanted = SplitTable.of([split(12, 2, *one) for one in ((2, 2, 2, 0), (1, 4, 1, 0), (3, 3, 0, 0), (2, 2, 1, 1))])
    tried = [split(12, 4, 0, 2, 1, 0), split(12, 3, 2, 1, 1, 0)]
    assert state_after(problem, tried).is_untold_share(wanted).tolist() == [False, False, True, True]
    tried += [split(12, 6, 1, 1, 0, 0), even(12, 3, 4)]
    assert not state_after(problem, tried).is_untold_share(wanted).any()


@pytest.mark.parametrize("B", [1, 2, 7])
def test_fewer_samples_than_cards_are_enough(B: int) -> None:
    """A batch smaller than the number of cards is searched like any other."""
    problem = job(8, B=B)
    _, trials = search(problem)
    assert best_of(problem, trials) >= 0.98


def test_a_device_filled_by_others_is_left_idle() -> None:
    """A card whose memory is taken to the last byte needs none where it has no share, so such
    splits are sure to fit."""
    problem = job([card_memory(is_first=True), card_memory(total=500, outside=500)], B=8)
    _, trials = search(problem)
    assert any(one.fits and one.split == split(8, 1, 8, 0) for one in trials)


def two_kinds() -> Job:
    """GPU 1 is slower and smaller than the five others, and a sample takes 2 GiB."""
    fast = CardTime(launch_s=0.0078, sample_s=0.00088, tile=32, tile_weight=0.43)
    slow = CardTime(launch_s=0.0094, sample_s=0.0016, tile=32, tile_weight=0.43)
    memory = {"parameters": 657, "stays": 0.177, "sample": 2048, "outside": 337}
    large = card_memory(total=40960, **memory)
    memories = [card_memory(is_first=True, state=657, total=40960, **memory), card_memory(total=24576, **memory)]
    curved = [replace(card, power=1.045, reserve=0.011) for card in (*memories, *[large] * 4)]
    return job(
        curved,
        B=660,
        times=[fast, slow, *[fast] * 4],
        shares="each",
        micro_step_s=0.035,
        replica_s=0.0085,
        update_s=0.025,
        reduce_s=0.0045,
    )


def test_what_one_card_had_no_headroom_for_is_unlikely_to_fit_another_of_its_kind() -> None:
    """Cards 2 to 5 are alike: two of them kept too little with 16 samples, so none of the four likelier than not keeps
    it with as many: no peak repeats exactly, so one may."""
    problem = two_kinds()
    failed = split(660, 11, 0, 0, 16, 16, 14, 14)
    state = state_after(problem, [even(660, 110, 6), even(660, 13, 6), failed])
    assert state.trials[-1].oom_devices == {2, 3}
    assert state.scores is not None
    table = state.scores.table
    as_many = (table.steps > 1) & (table.shards[:, 2:] >= 16).any(axis=1)  # one step has no gradients to keep
    assert as_many.any()
    assert (state.scores.needed.chance_below(state.limits)[as_many] < 0.5).all()


def test_within_a_tenth_of_the_best_is_found_where_two_kinds_run_short() -> None:
    """Headroom fails on five cards at once, and the allocator's own varies: what it held too much of with one share is
    not tried with a larger one, which here would have kept enough."""
    problem = two_kinds()
    _, trials = search(problem, most=12)
    assert best_of(problem, trials) >= 0.9


def test_gpu0_may_be_unsure_where_the_others_are_sure() -> None:
    """A sample fills most of a card. Whether it fits beside what GPU 0 holds is tried with what
    fits the others for sure, and nothing runs out of memory once something ran."""
    slow, fast = CardTime(launch_s=0.022, sample_s=0.0094), CardTime(launch_s=0.018, sample_s=0.0046)
    memory = {"parameters": 785, "stays": 0.854, "sample": 32744}
    like_gpu0 = card_memory(workspace=53, total=40960, outside=388, **memory)
    memories = [
        card_memory(is_first=True, state=1571, workspace=53, total=40960, outside=1740, **memory),
        like_gpu0,
        like_gpu0,
        card_memory(workspace=182, total=49152, outside=388, **memory),
        card_memory(workspace=53, total=40960, outside=11206, **memory),
        like_gpu0,
    ]
    times = [slow, slow, slow, fast, slow, slow]
    problem = job(memories, B=87, times=times, shares="each", micro_step_s=0.0073, replica_s=0.0038, reduce_s=0.0157)
    _, trials = search(problem, most=12)
    first = next(place for place, one in enumerate(trials) if one.ran)
    assert not any(one.lacks_memory for one in trials[first:])
    assert best_of(problem, trials) == pytest.approx(1)


def test_nothing_is_scored_before_a_trial_ran() -> None:
    """The models know nothing then: no scores, no time model, and memory without limits."""
    state = state_after(job(2, B=16))
    assert not state.any_ran
    assert state.scores is None
    assert np.isinf(state.limits).all()


def test_what_was_measured_is_no_candidate() -> None:
    """Of the listed splits those not measured are scored; where nothing is left, there are no scores."""
    problem = job(1, B=4)
    state = state_after(problem, [even(4, 4, 1), even(4, 2, 1)])
    assert state.scores is not None
    assert state.scores.table.splits() == [even(4, 1, 1)]
    assert state_after(problem, [even(4, 4, 1), even(4, 2, 1), even(4, 1, 1)]).scores is None


def test_neighbours_of_the_fastest_few_are_candidates() -> None:
    """The fastest may have none that is better, or none at all: those of the second are looked at, too."""
    second = split(28, 2, 2, 2, 2, 2, 2, 2, 2)
    state = state_after(job(7, B=28, shares="each"), [even(28, 1, 7), second])
    assert state.scores is not None
    assert split(28, 2, 3, 1, 2, 2, 2, 2, 2) in state.scores.table.splits()
