from __future__ import annotations

from splittune.search.moves import directions, distance, moved, rebalanced

GPU0, OTHERS = (0,), (1, 2, 3)


def test_moved_samples_are_spread_over_the_group() -> None:
    """Samples leave one group and are shared evenly by the other."""
    assert moved((16, 16, 16, 16), GPU0, OTHERS, 4, smallest=0) == (12, 18, 17, 17)
    assert moved((12, 18, 17, 17), OTHERS, GPU0, 4, smallest=0) == (16, 16, 16, 16)


def test_no_move_leaves_a_device_too_few() -> None:
    """A move that would go below the smallest share is none."""
    assert moved((3, 5), (0,), (1,), 4, smallest=0) is None
    assert moved((3, 5), (0,), (1,), 3, smallest=1) is None


def test_distance_is_the_length_of_the_move_that_was_made() -> None:
    """The distance counts the samples moved, is negative backwards, and 0 off the line."""
    assert distance((16, 16, 16), (12, 20, 16), (0,), (1,)) == 4
    assert distance((12, 20, 16), (16, 16, 16), (0,), (1,)) == -4
    assert distance((16, 16, 16), (12, 16, 20), (0,), (1,)) == 0


def test_work_is_taken_from_the_busiest_device_only() -> None:
    """A step lasts as long as its busiest device, so only moves away from that one are proposed, to the idlest first."""
    groups = [(0,), (1,), (2,)]
    assert list(directions(groups, (1.0, 3.0, 2.0))) == [((1,), (0,)), ((1,), (2,))]
    assert len(list(directions(groups, None))) == 6


def test_rebalanced_shares_follow_the_measured_speed() -> None:
    """A device twice as fast gets twice the samples; without busy times, or in balance, there is nothing to do."""
    assert rebalanced((8, 8), (2.0, 1.0), [(0,), (1,)]) == (5, 11)
    assert rebalanced((8, 8), None, [(0,), (1,)]) is None
    assert rebalanced((8, 8), (1.0, 1.02), [(0,), (1,)]) is None
    assert rebalanced((0, 8), (0.0, 1.0), [(0,), (1,)]) is None
