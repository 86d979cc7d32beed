from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.problems.problem import CardTime
from splittune.search.models.kinds import is_longer_than_smaller, kinds_of
from splittune.split import BatchSplit
from tests.search.problem import even, job, split, trials

B = 64


def told(tried: Sequence[BatchSplit], *sample_s: float) -> tuple[int, ...] | None:
    """The kinds after these trials of cards that take so long for a sample, behind a host that takes 100 ms."""
    times = [CardTime(launch_s=0.001, sample_s=each) for each in sample_s]
    problem = job(len(times), B=B, times=times, replica_s=0.1, micro_step_s=0.0, update_s=0.001, shares="each")
    return kinds_of(problem.space(), trials(problem, tried))


ALONE = [split(B, 8, 8, 0), split(B, 8, 0, 8)]
LARGER = [split(B, 2, 32, 0), split(B, 2, 0, 32)]


def test_before_a_trial_ran_there_are_no_kinds() -> None:
    assert told([], 0.001, 0.001) is None


@pytest.mark.parametrize("slow_s", [0.01, 0.02])
def test_cards_that_both_waited_for_the_host_may_differ(slow_s: float) -> None:
    """Eight samples take both 100 ms, and fewer took no less; 32 tell that they are alike, or that they are not."""
    assert told([split(B, 16, 4, 0), *ALONE], 0.01, 0.01) == (0, 1)
    assert told([split(B, 16, 4, 0), *ALONE, *LARGER], 0.01, slow_s) == ((0, 0) if slow_s == 0.01 else (0, 1))


def test_cards_that_took_as_long_are_alike_where_no_smaller_share_was_tried() -> None:
    """Nothing speaks against it."""
    assert told(ALONE, 0.01, 0.01) == (0, 0)


def test_a_single_sample_tells_nothing() -> None:
    """Two cards of unlike speed take 100 ms for one: the host decides."""
    assert told([split(B, 64, 1, 0), split(B, 64, 0, 1)], 0.01, 0.09) == (0, 1)


def test_what_took_longer_than_smaller_shares_tells() -> None:
    """Of one card's 4, 8 and 32 samples, behind a host that takes 100 ms, the last take longer."""
    problem = job(1, B=B, times=[CardTime(launch_s=0.001, sample_s=0.01)], replica_s=0.1, micro_step_s=0.0)
    ran = trials(problem, [even(B, k, 1) for k in (16, 8, 2)])
    assert not is_longer_than_smaller(8, 0.101, ran)
    assert is_longer_than_smaller(32, 0.321, ran)
    assert is_longer_than_smaller(4, 0.1, ran)
