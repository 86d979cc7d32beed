from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splittune.search.attempt import Attempt, lacking_devices
from splittune.search.shares import Limits, ShareFinder, groups_of, limits_of
from splittune.split import BatchSplit, SplitSpace
from tests.search.problem import Problem


def finder(
    *limits: tuple[int, int],
    groups: tuple[tuple[int, ...], ...] = ((0,), (1, 2, 3)),
    m: int = 64,
    guess: int | None = None,
) -> ShareFinder:
    return ShareFinder(
        groups=groups,
        limits=tuple(Limits(fits=fits, fails=fails) for fits, fails in limits),
        guesses=(guess,) * len(groups),
        micro_batch_size=m,
        smallest=0,
        resolution=1,
        num_fitting=0,
    )


def test_groups_follow_the_shares_of_the_space() -> None:
    """Under "gpu0" the devices after GPU 0 share evenly; under "each" every device is by itself."""
    assert groups_of(SplitSpace(global_batch_size=8, num_devices=3)) == ((0,), (1, 2))
    assert groups_of(SplitSpace(global_batch_size=8, num_devices=3, shares="each")) == ((0,), (1,), (2,))
    assert groups_of(SplitSpace(global_batch_size=8, num_devices=1)) == ((0,),)


def test_even_shares_are_wanted_while_no_limit_is_known() -> None:
    """Without failures the even split is wanted."""
    assert finder((-1, 65), (-1, 65)).wanted() == (16, 16, 16, 16)


def test_a_limited_share_is_guessed_then_bisected() -> None:
    """A share that failed is replaced by the guess, or the middle; the others take the rest evenly."""
    assert finder((-1, 16), (-1, 65), guess=5).wanted() == (5, 20, 20, 19)
    assert finder((-1, 16), (-1, 65)).wanted() == (7, 19, 19, 19)
    assert finder((4, 6), (-1, 65)).wanted() == (5, 20, 20, 19)
    assert finder((5, 6), (-1, 65)).wanted() == (5, 20, 20, 19)


def test_limited_others_leave_more_to_gpu_0() -> None:
    """When the devices after GPU 0 are the smaller ones, GPU 0 takes what they cannot."""
    assert finder((-1, 65), (10, 11)).wanted() == (34, 10, 10, 10)


def test_limits_that_cannot_hold_the_micro_batch_are_seen() -> None:
    """When even the largest hopeful shares do not sum to the micro-batch, nothing is wanted."""
    assert finder((5, 6), (18, 20)).wanted() is None
    assert finder((-1, 0), (18, 65)).wanted() is None
    assert finder((5, 6), (-1, 21), guess=5).wanted() == (5, 20, 20, 19)


@given(
    m=st.integers(1, 60),
    groups=st.sampled_from([((0,),), ((0,), (1,)), ((0,), (1, 2, 3)), ((0,), (1,), (2,))]),
    data=st.data(),
)
def test_wanted_shares_keep_below_the_limits_and_sum_to_the_micro_batch(
    m: int, groups: tuple[tuple[int, ...], ...], data: st.DataObject
) -> None:
    """Whatever the limits, wanted shares are legal and below every limit; None only where that cannot be."""
    limits = []
    for _ in groups:
        fails = data.draw(st.integers(0, m + 1))
        limits.append((data.draw(st.integers(-1, fails - 1)) if fails else -1, fails))
    guess = data.draw(st.none() | st.integers(0, m))
    shards = finder(*limits, groups=groups, m=m, guess=guess).wanted()
    if shards is None:
        room = sum((fails - 1) * len(group) for group, (_, fails) in zip(groups, limits, strict=True))
        assert room < m or any(fails == 0 for _, fails in limits)
        return
    assert sum(shards) == m
    assert min(shards) >= 0
    for group, (_, fails) in zip(groups, limits, strict=True):
        assert max(shards[device] for device in group) < fails


def test_limits_of_gpu_0_and_of_the_others() -> None:
    """GPU 0's limit holds from its own step counts on; the others' depends on their shards alone."""
    problem = Problem(total_mib=(850, 1250, 1250, 1250))
    attempts = []
    for steps, shards in [(1, (16, 16, 16, 16)), (2, (8, 8, 8, 8)), (1, (8, 19, 19, 18))]:
        measurement = problem.measure(BatchSplit(global_batch_size=64, accumulation_steps=steps, shard_sizes=shards))
        measurement = measurement.judged(0)
        attempts.append(Attempt(measurement=measurement, lacking=lacking_devices(measurement, (0,) * 4)))
    assert limits_of((0,), attempts, 1, 64, 0) == Limits(fits=8, fails=16)
    assert limits_of((0,), attempts, 3, 22, 0) == Limits(fits=8, fails=23)
    assert limits_of((1, 2, 3), attempts, 3, 22, 0) == Limits(fits=8, fails=16)
