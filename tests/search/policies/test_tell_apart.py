from __future__ import annotations

from dataclasses import replace

import pytest

from splittune.search.policies.base import Proposal
from splittune.search.policies.tell_apart import TellApart
from splittune.split import BatchSplit
from tests.search.policies.story import best_of, of_kind, search, state_after
from tests.search.problem import CardTime, Job, card_memory, even, job, split


def two_kinds(**more: object) -> Job:
    """Four cards that do not say how long they work; two have half the memory and are three times as fast."""
    slow, fast = CardTime(launch_s=0.004, sample_s=0.003), CardTime(launch_s=0.004, sample_s=0.001)
    small = card_memory(sample=20, total=12_000)
    memories = [card_memory(is_first=True, sample=20, total=24_000), card_memory(sample=20, total=24_000), small, small]
    return job(memories, B=160, times=[slow, slow, fast, fast], shares="each", tells_busy=False, **more)  # type: ignore[arg-type]


def test_each_device_is_measured_alone_and_then_balanced() -> None:
    """After the even splits one trial of each; those as fast as one another are one kind from then on, and shares
    that finish together are found."""
    problem = two_kinds()
    proposals, trials = search(problem, most=12)
    alone = of_kind("tell apart", proposals)
    took_part = {tuple(share > 0 for share in one.split.shard_sizes) for one in alone}
    assert took_part == {tuple(i == device for i in range(4)) for device in range(4)}
    assert state_after(problem, trials).kinds == (0, 0, 2, 2)
    assert best_of(problem, trials) >= 0.98


def test_none_is_measured_alone_where_busy_times_tell() -> None:
    """They say which card is slow."""
    problem = replace(two_kinds(), tells_busy=True)
    assert TellApart().propose(state_after(problem, [even(160, 1, 4)])) is None


@pytest.mark.parametrize("B", [60, 61])
@pytest.mark.parametrize("shares", ["each", "gpu0"])
def test_a_kind_that_was_alone_is_not_asked_again(shares: str, B: int) -> None:
    """Once GPU 0 alone and the others alone were measured nothing is left to tell apart."""
    problem = job(3, B=B, shares=shares, tells_busy=False)  # type: ignore[arg-type]
    tried = [even(B, 2, 3)]
    while (wanted := TellApart().propose(state_after(problem, tried))) is not None:
        assert wanted.split not in tried
        if shares == "gpu0":
            size, steps = wanted.split.gpu0_bsz, wanted.split.accumulation_steps
            assert wanted.split == BatchSplit.with_gpu0(
                global_batch_size=B, accumulation_steps=steps, num_devices=3, gpu0_bsz=size
            )
        tried.append(wanted.split)
    assert len(tried) == (3 if shares == "gpu0" else 4)


def test_cards_that_must_take_part_get_the_least() -> None:
    """Where every card has a share at least, the others get that; shares too small to tell are raised until they do."""
    problem = job(2, B=60, tells_busy=False)
    least = replace(problem.space(), min_shard_size=1)

    def wanted(steps: int) -> Proposal | None:
        state = state_after(problem, [even(60, steps, 2)])
        return TellApart().propose(replace(state, tables=replace(state.tables, space=least)))

    alone = wanted(3)
    assert alone is not None
    assert alone.split == split(60, 6, 9, 1)
    raised = wanted(20)
    assert raised is not None
    assert raised.split == split(60, 15, 3, 1)


def test_where_no_card_can_be_alone_those_of_one_size_are_measured_together() -> None:
    """Of 29 samples six cards must have 2 each, and none holds the 19 that would be left to one by itself. Four of
    12,000 MiB have 6 or 7 while two of 5,000 have 2; that is asked once."""
    sizes = [12_000] * 4 + [5_000] * 2
    memories = [card_memory(is_first=i == 0, sample=900, total=total) for i, total in enumerate(sizes)]
    problem = job(memories, B=29, shares="each", tells_busy=False)
    least, tried = replace(problem.space(), min_shard_size=2), [even(29, 2, 6)]

    def wanted() -> Proposal | None:
        state = state_after(problem, tried)
        return TellApart().propose(replace(state, tables=replace(state.tables, space=least)))

    together = wanted()
    assert together is not None
    assert together.reason.startswith("GPU 0, GPU 1, GPU 2, GPU 3 alone")
    assert sorted(together.split.shard_sizes) == [2, 2, 6, 6, 6, 7]
    assert together.split.shard_sizes[-2:] == (2, 2)
    assert problem.fits(together.split)
    tried.append(together.split)
    assert wanted() is None


def test_no_kind_is_given_more_than_an_even_split_had() -> None:
    """What fitted every card evenly fits it alone."""
    problem = job(2, B=60, tells_busy=False)
    wanted = TellApart().propose(state_after(problem, [split(60, 3, 10, 10)]))
    assert wanted is not None
    assert max(wanted.split.shard_sizes) <= 10


def test_a_card_that_had_no_share_yet_is_asked_with_one_sample() -> None:
    """Of 5 samples over 4 cards GPU 0 had none: it is measured with one, if that likely fits."""
    problem = job(4, B=5, shares="each", tells_busy=False)
    state = state_after(problem, [split(5, 2, 0, 1, 1, 1)])
    wanted = TellApart().propose(state)
    assert wanted is not None
    assert wanted.split == split(5, 5, 1, 0, 0, 0)


def test_a_kind_is_not_asked_where_it_may_well_run_out() -> None:
    """GPU 0 had no share yet: a sample keeps its headroom with a chance of 82 % in 1,100 MiB, and of 75 in 1,000."""
    wanted = []
    for total in (1100, 1000):
        card = dict[str, float](parameters=300, sample=300)
        memories = [card_memory(is_first=True, total=total, **card), *[card_memory(total=3000, **card)] * 3]
        problem = job(memories, B=5, shares="each", tells_busy=False)
        proposal = TellApart().propose(state_after(problem, [split(5, 2, 0, 1, 1, 1)]))
        assert proposal is not None
        wanted.append(proposal.split.shard_sizes)
    assert wanted == [(1, 0, 0, 0), (0, 1, 0, 0)]


def test_a_share_that_fitted_the_whole_batch_is_not_asked_where_gradients_stay() -> None:
    """Half of 64 samples fit on GPU 0 in a single step. Alone it takes two steps for them, and in the second the
    gradients of the first, 1,000 MiB, are held as well: more than is left."""
    card = dict[str, float](parameters=1000, state=2000, sample=100, stays=1, total=6800)
    memories = [card_memory(is_first=i == 0, **card) for i in range(2)]
    problem = job(memories, B=64, shares="gpu0", tells_busy=False)
    tried = [even(64, 32, 2), even(64, 4, 2), even(64, 1, 2)]
    assert problem.fits(tried[-1])
    assert not problem.fits(split(64, 2, 32, 0))
    wanted = TellApart().propose(state_after(problem, tried))
    assert wanted is None or wanted.split.gpu0_bsz == 0
