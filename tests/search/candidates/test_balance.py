from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from splittune.search.candidates.balance import TimeOfShares
from splittune.search.candidates.balance import balanced_table as balanced_table_of
from splittune.search.candidates.table import SplitTable, micro_batches
from splittune.search.models.curves import Curve
from splittune.split import SplitSpace

Floats = NDArray[np.float64]


def line(floor_s: float, slope_s: float, knee: float = 0.0) -> Curve:
    return Curve(floor_s, slope_s, knee, np.array([1.0]), np.zeros(1))


def with_limits(space: SplitSpace, limits: list[int]) -> Floats:
    return np.tile(np.array(limits, dtype=float), (1, len(list(micro_batches(space))), 1))


def balanced_table(
    space: SplitSpace, curves: Sequence[TimeOfShares], most_shares: Floats, gpu0_per_sample_s: float = 0.0
) -> SplitTable:
    pairs = np.array(list(micro_batches(space)), dtype=float)
    return balanced_table_of(space, pairs, curves, most_shares, gpu0_per_sample_s)


def slowest_s(curves: list[Curve], shards: Floats, gpu0_per_sample_s: float = 0.0) -> Floats:
    """(N, n) shards to the seconds of the slowest card."""
    busy_s = np.stack([curve(shards[:, i]) for i, curve in enumerate(curves)], axis=1)
    busy_s[:, 0] += gpu0_per_sample_s * shards.sum(axis=1)
    return busy_s.max(axis=1)


def every_composition(size: int, limits: list[int], smallest: int) -> Floats:
    choices = product(*(range(smallest, min(limit, size) + 1) for limit in limits))
    return np.array([shards for shards in choices if sum(shards) == size], dtype=float).reshape(-1, len(limits))


@st.composite
def machines(draw: st.DrawFn) -> tuple[SplitSpace, list[Curve], list[int]]:
    num_devices = draw(st.integers(1, 4))
    smallest = draw(st.sampled_from([0, 0, 1, 2]))
    space = SplitSpace(
        global_batch_size=draw(st.integers(max(1, num_devices * smallest), 14)),
        num_devices=num_devices,
        shares="each",
        min_shard_size=smallest,
    )
    curves = [
        line(draw(st.sampled_from([0.0, 1.0, 3.5])), draw(st.sampled_from([0.3, 1.0, 1.7])), draw(st.integers(0, 5)))
        for _ in range(num_devices)
    ]
    return space, curves, [draw(st.integers(0, 14)) for _ in range(num_devices)]


def of_size(table: SplitTable, size: int) -> Floats:
    return table.shards[table.micro_batch_sizes == size]


@given(machine=machines())
def test_shards_are_legal_and_within_what_memory_holds(machine: tuple[SplitSpace, list[Curve], list[int]]) -> None:
    """Every row is a split of the space, and no card gets more than its limit or, taking part, less
    than the least share."""
    space, curves, limits = machine
    table = balanced_table(space, curves, with_limits(space, limits))
    assert all(table.split(row) in space for row in range(len(table)))
    assert (table.shards <= np.array(limits)).all()
    assert (table.shards >= space.min_shard_size).all()


@given(machine=machines(), gpu0_per_sample_s=st.sampled_from([0.0, 0.1, 0.6]))
def test_with_all_cards_taking_part_the_slowest_is_as_fast_as_can_be(
    machine: tuple[SplitSpace, list[Curve], list[int]], gpu0_per_sample_s: float
) -> None:
    """Of all ways to share a micro-batch within the limits none has a slowest card that is faster,
    as trying all shows; GPU 0 may have work with the whole micro-batch besides."""
    space, curves, limits = machine
    table = balanced_table(space, curves, with_limits(space, limits), gpu0_per_sample_s)
    smallest = max(1, space.min_shard_size)
    for _, size in micro_batches(space):
        possible = every_composition(size, limits, smallest)
        if len(possible):
            found = of_size(table, size)
            assert len(found)
            fastest_s, least_s = (slowest_s(curves, some, gpu0_per_sample_s).min() for some in (found, possible))
            assert fastest_s <= least_s * (1 + 1e-9)


def test_lines_are_balanced_in_closed_form() -> None:
    """A card twice as fast gets twice the samples, and a launch floor is paid for in samples."""
    space = SplitSpace(global_batch_size=12, num_devices=2, shares="each", max_accumulation_steps=1)
    whole = balanced_table(space, [line(0.0, 2.0), line(0.0, 1.0)], with_limits(space, [12, 12]))
    assert [4.0, 8.0] in whole.shards.tolist()
    floored = balanced_table(space, [line(4.0, 1.0), line(0.0, 1.0)], with_limits(space, [12, 12]))
    assert [4.0, 8.0] in floored.shards.tolist()


def test_what_gpu0_works_besides_is_paid_for_in_samples() -> None:
    """3 s for 12 samples are as long as 3 samples take: it has 4 of them, and the other card 8."""
    space = SplitSpace(global_batch_size=12, num_devices=2, shares="each", max_accumulation_steps=1)
    table = balanced_table(space, [line(0.0, 1.0)] * 2, with_limits(space, [12, 12]), gpu0_per_sample_s=0.25)
    assert {tuple(row) for row in table.shards.tolist()} == {(4.0, 8.0), (0.0, 12.0)}


def test_what_memory_does_not_hold_goes_to_the_others() -> None:
    """A card with room for 2 gets 2, and the others balance the rest."""
    space = SplitSpace(global_batch_size=12, num_devices=3, shares="each", max_accumulation_steps=1)
    table = balanced_table(space, [line(0.0, 1.0)] * 3, with_limits(space, [2, 12, 12]))
    assert [2.0, 5.0, 5.0] in table.shards.tolist()


def test_slow_cards_may_stay_out() -> None:
    """Every number of cards is tried, fastest first, GPU 0 left out too; with a least share all take part."""
    space = SplitSpace(global_batch_size=12, num_devices=3, shares="each", max_accumulation_steps=1)
    curves = [line(1.0, 1.0), line(1.0, 0.5), line(1.0, 4.0)]
    found = {tuple(row > 0) for row in balanced_table(space, curves, with_limits(space, [12] * 3)).shards}
    assert found == {
        (False, True, False),
        (True, True, False),
        (True, True, True),
        (False, True, True),
    }
    least = SplitSpace(global_batch_size=12, num_devices=3, shares="each", max_accumulation_steps=1, min_shard_size=2)
    assert (balanced_table(least, curves, with_limits(space, [12] * 3)).shards >= 2).all()


def test_micro_batches_that_no_cards_can_take_are_left_out() -> None:
    """Where the limits together hold 7, there is no row for 12 samples, and one for 6."""
    space = SplitSpace(global_batch_size=12, num_devices=2, shares="each")
    table = balanced_table(space, [line(0.0, 1.0)] * 2, with_limits(space, [3, 4]))
    assert table.micro_batch_sizes.max() == 6
    assert of_size(table, 6).tolist() == pytest.approx(np.array([[3.0, 3.0]]))


def test_the_odd_sample_does_not_go_to_gpu0() -> None:
    """Where all cards are alike and the samples do not go round, GPU 0, which holds most, is asked last."""
    space = SplitSpace(global_batch_size=10, num_devices=4, shares="each", max_accumulation_steps=1)
    table = balanced_table(space, [line(0.0, 1.0)] * 4, with_limits(space, [10] * 4))
    everybody = table.shards[(table.shards > 0).all(axis=1)]
    assert everybody.tolist() == [[2.0, 3.0, 3.0, 2.0]]


def test_the_cards_that_take_most_take_part() -> None:
    """A fast card that memory holds to two samples gives its place to a slower one that takes ten."""
    space = SplitSpace(global_batch_size=20, num_devices=3, shares="each")
    curves = [line(0.0, 2.0), line(0.0, 1.0), line(0.0, 3.0)]
    table = balanced_table(space, curves, with_limits(space, [20, 2, 20]))
    pairs = of_size(table, 20)[(of_size(table, 20) > 0).sum(axis=1) == 2]
    assert [12.0, 0.0, 8.0] in pairs.tolist()


def test_no_share_stops_short_of_a_faster_kernel() -> None:
    """From 8 samples on another kernel takes half the time: cards take 8 rather than the 7 that take longer."""
    space = SplitSpace(global_batch_size=16, num_devices=3, shares="each")
    faster = Curve(0.0, 1.0, 0.0, np.array([1.0, 7.0, 8.0, 16.0]), np.log([1.0, 1.0, 0.5, 0.5]))
    table = balanced_table(space, [faster] * 3, with_limits(space, [16] * 3))
    assert sorted(of_size(table, 16)[(of_size(table, 16) > 0).sum(axis=1) == 2][0])[1:] == [8.0, 8.0]


def test_there_is_a_split_for_each_way_to_tell_what_fits() -> None:
    """Of two answers to what memory holds both are there: what fits for sure, and what is faster."""
    space = SplitSpace(global_batch_size=12, num_devices=2, shares="each")
    careful, bold = with_limits(space, [4, 12]), with_limits(space, [6, 12])
    table = balanced_table(space, [line(0.0, 1.0)] * 2, np.concatenate([careful, bold]))
    assert {(4.0, 8.0), (6.0, 6.0)} <= {tuple(row) for row in of_size(table, 12)}


def test_a_faster_kernel_is_reached_by_whole_cards_or_not_at_all() -> None:
    """From 8 samples on half the time: two cards take 8 and the third the 3 that are left, none 7,
    which takes longer."""
    space = SplitSpace(global_batch_size=19, num_devices=3, shares="each", max_accumulation_steps=1)
    faster = Curve(0.0, 1.0, 0.0, np.array([1.0, 7.0, 8.0, 16.0]), np.log([1.0, 1.0, 0.5, 0.5]))
    found = balanced_table(space, [faster] * 3, with_limits(space, [19] * 3)).shards
    everybody = found[(found > 0).all(axis=1)]
    assert slowest_s([faster] * 3, everybody).min() == pytest.approx(4.0)
    assert sorted(everybody[0]) == [3.0, 8.0, 8.0]


def test_of_cards_that_take_as_much_those_take_part_that_fit_for_sure() -> None:
    """Memory may hold a sample on any card and does for sure on GPU 2: beside GPU 0 it is the one of two."""
    space = SplitSpace(global_batch_size=2, num_devices=4, shares="each", max_accumulation_steps=1)
    sure, possible = with_limits(space, [0, 0, 1, 0]), with_limits(space, [1, 1, 1, 1])
    table = balanced_table(space, [line(0.0, 1.0)] * 4, np.concatenate([sure, possible]))
    assert [1.0, 0.0, 1.0, 0.0] in table.shards.tolist()
