from __future__ import annotations

from dataclasses import replace

from benchmarks.search import layered
from splittune.profiling.measurement import Outcome
from splittune.search import find_best_split
from splittune.search.candidates.table import can_be_listed
from splittune.search.judged_trials import JudgedTrial
from splittune.search.policies.proposer import Proposer
from splittune.search.policies.smallest_left import SmallestLeft
from tests.search.policies.story import search, state_after
from tests.search.problem import MIB, card_memory, even, job, linear_job, split


def test_when_nothing_fitted_the_smallest_burden_on_the_suspect_comes_next() -> None:
    """After GPU 0 ran out of memory with one sample, splits that spare it are tried before all else; with one it is
    trusted again only in a single step, which holds no gradients beside."""
    problem = job([card_memory(is_first=True, sample=150, total=340), card_memory(sample=150)], B=16)
    proposals, trials = search(problem, most=6)
    assert trials[0].oom_devices == {0}
    assert proposals[1].kind == "smallest left"
    assert proposals[1].split == split(16, 16, 0, 1)
    assert trials[1].fits
    assert all(proposal.split.gpu0_bsz == 0 for proposal in proposals[1:3])
    assert all(one.split.gpu0_bsz == 0 or one.split.accumulation_steps == 1 for one in proposals[1:])


def test_it_gives_up_when_all_is_ruled_out() -> None:
    """Where no card holds a sample the search ends, and nothing is open."""
    problem = job([card_memory(is_first=True, total=50), card_memory(total=50)], B=8)
    proposer = Proposer(problem.space(), problem.min_headroom_bytes)
    proposals, trials = search(problem)
    assert len(proposals) < 8
    assert proposer.propose(trials) is None
    assert not proposer.has_open(trials)


def test_a_single_step_is_tried_where_nothing_fits_that_accumulates() -> None:
    """The copy of the gradients that accumulation costs GPU 0 is what does not fit: the whole batch
    at once has none."""
    problem = linear_job(B=8, num_devices=2, total_mib=(850, 1000), gradients_mib=900.0, oom="named")
    proposals, trials = search(problem)
    whole = next(place for place, one in enumerate(proposals) if one.kind == "whole batch")
    assert proposals[whole].split == even(8, 1, 2)
    assert trials[whole].fits
    assert not any(trial.fits for trial in trials[:whole])


def test_of_a_single_step_the_split_that_likeliest_fits_is_tried_where_memory_was_read() -> None:
    """Accumulating leaves GPU 0 too little headroom. Of 600 samples at once it holds 162, and the others have room: an
    even third would run out of memory."""
    replica = card_memory(parameters=1000, stays=1, sample=12, total=9000)
    gpu0 = card_memory(is_first=True, parameters=1000, stays=1, sample=12, total=3100)
    problem = job([replace(gpu0, update=1000 * MIB), replica, replica], B=600)
    proposals, trials = search(problem)
    whole = next(place for place, one in enumerate(proposals) if one.kind == "whole batch")
    assert any(trial.ran for trial in trials[:whole])
    assert not any(trial.fits for trial in trials[:whole])
    assert not problem.runs(even(600, 1, 3))
    assert trials[whole].fits


def test_of_a_single_step_shares_of_gpu0_are_halved() -> None:
    """The whole batch fits with 4 of 16 samples on GPU 0 alone: 5 are too many for it, and 3 leave 7 to another."""
    problem = linear_job(B=16, num_devices=3, total_mib=(450, 650, 650), gradients_mib=900.0, oom="named")
    proposals, trials = search(problem, most=12)
    whole = [place for place, one in enumerate(proposals) if one.kind == "whole batch"]
    assert proposals[whole[0]].split == even(16, 1, 3)
    assert [place for place, one in enumerate(trials) if one.fits] == [whole[-1]]
    assert proposals[whole[-1]].split == split(16, 1, 4, 6, 6)
    assert len(whole) <= 4


def test_of_a_single_step_shares_of_gpu0_are_spread_out_where_no_device_is_named() -> None:
    """Nobody says whether it was GPU 0, which holds 12 of 64 samples at most, or another, which holds 30: the share
    furthest from all that failed comes next."""
    problem = linear_job(B=64, num_devices=3, total_mib=(1200, 3000, 3000), gradients_mib=9000.0, oom="silent")
    proposals, trials = search(problem, most=12)
    whole = [place for place, one in enumerate(proposals) if one.kind == "whole batch"]
    assert [proposals[place].split.gpu0_bsz for place in whole] == [21, 43, 10]
    assert [trials[place].fits for place in whole] == [False, False, True]


def test_of_a_single_step_shares_are_in_proportion_to_what_failed() -> None:
    """GPUs 0 to 2 hold 12 of 61 samples and GPU 3 holds 27, and no card the copy of gradients: one sample less a trial,
    from all on GPU 3, would be 34 trials."""
    problem = linear_job(B=61, num_devices=4, total_mib=(1250, 1250, 1250, 2750), oom="named", shares="each")
    problem.memories = [replace(card, accumulating=9000 * MIB) for card in problem.memories]
    assert problem.fits(split(61, 1, 12, 12, 12, 25))
    assert not problem.fits(split(61, 1, 13, 12, 12, 24))
    assert not problem.fits(split(61, 1, 11, 11, 11, 28))
    _, trials = search(problem, most=12)
    assert any(trial.fits for trial in trials)


def test_it_ends_once_a_split_fits() -> None:
    """One that ran and kept too little headroom is not enough."""
    assert SmallestLeft().propose(state_after(job(2, B=16), [even(16, 8, 2)])) is None
    tight = job([card_memory(is_first=True, total=310), card_memory(total=310)], B=16)
    ran_without_headroom = state_after(tight, [even(16, 8, 2)])
    assert ran_without_headroom.any_ran
    assert not ran_without_headroom.any_fits
    assert SmallestLeft().propose(ran_without_headroom) is not None


def test_where_all_that_is_listed_fails_samples_move_to_cards_that_did_not() -> None:
    """Every card has a share, and GPU 2 alone holds more than 3 samples: no split that spreads evenly beside GPU 0
    fits, and all are too many to list."""
    small, large = card_memory(sample=100, total=580), card_memory(sample=100, total=5000)
    problem = job([card_memory(is_first=True, sample=100, total=580), small, large, *[small] * 5], B=26, shares="each")
    space = replace(problem.space(), max_accumulation_steps=1, min_shard_size=1)
    assert not can_be_listed(space)
    found = find_best_split(
        space, problem.measure, min_headroom_bytes=problem.min_headroom_bytes, max_trials=32, confirm=problem.confirm
    )
    assert found.best.split.shard_sizes[2] > 3
    assert max(share for device, share in enumerate(found.best.split.shard_sizes) if device != 2) <= 3


def test_what_likely_fits_by_what_a_trial_held_comes_first() -> None:
    """The smallest even split gives GPU 1 two samples, and it has room for one. GPU 0 has, too, and GPUs 2 to 4 and 6
    for many: after that trial none is needed that runs out of memory before one fits."""
    small, large = card_memory(sample=100, total=415), card_memory(sample=100, total=5000)
    gpu0 = card_memory(is_first=True, sample=100, total=380)
    problem = job([gpu0, small, large, large, large, small, large], B=16, shares="each")
    space = replace(problem.space(), min_shard_size=1)
    assert not can_be_listed(space)
    found = find_best_split(
        space, problem.measure, min_headroom_bytes=problem.min_headroom_bytes, max_trials=2, confirm=problem.confirm
    )
    first, second = (trial.measurement for trial in found.trials[:2])
    assert first.outcome is Outcome.NO_HEADROOM
    assert first.split.shard_sizes == (1, 2, 1, 1, 1, 1, 1)
    assert second.outcome is Outcome.OK


def test_free_blocks_of_the_allocator_rule_nothing_out() -> None:
    """The smallest even split kept none of the 2 GiB demanded, though 15 of what GPU 0 reserved were free blocks: of
    the 39 splits one other fits, with more samples on the replicas. It is found; if all that was reserved had been
    alive, nothing larger would be tried beside the whole batch at once.
    """
    problem = layered.draw(1110048)
    space, demands = problem.space(), problem.min_headroom_bytes
    proposer = Proposer(space, demands)
    first = proposer.propose([])
    assert first is not None
    ran = JudgedTrial.of(problem.measure(first.split), demands)
    assert ran.ran
    assert ran.lacks_cached
    following = proposer.propose([ran])
    assert following is not None
    assert ran.rules_out(following.split)
    found = find_best_split(
        space, problem.measure, min_headroom_bytes=demands, max_trials=8, confirm=problem.confirm, seed=problem.seed
    )
    assert problem.fits(found.best.split)

    full = [replace(memory, peak_allocated_bytes=memory.peak_reserved_bytes) for memory in ran.measurement.memory]
    alive = JudgedTrial.of(replace(ran.measurement, memory=tuple(full)), demands)
    assert not alive.lacks_cached
    other = Proposer(space, demands).propose([alive])
    assert other is not None
    assert other.kind == "whole batch"
