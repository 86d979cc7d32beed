"""`SplitSpace`: all legal splits, each once, the same whether iterated, counted or asked for with `in`."""

from __future__ import annotations

from itertools import islice, product
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.errors import InvalidSplitError
from splittune.split import BatchSplit, SplitSpace


@st.composite
def spaces(draw: st.DrawFn, max_batch: int = 12, max_devices: int = 4) -> SplitSpace:
    """Any space small enough to enumerate by force."""
    num_devices = draw(st.integers(min_value=1, max_value=max_devices))
    global_batch_size = draw(st.integers(min_value=1, max_value=max_batch))
    return SplitSpace(
        global_batch_size=global_batch_size,
        num_devices=num_devices,
        shares=draw(st.sampled_from(["gpu0", "each"])),
        min_shard_size=draw(st.integers(min_value=0, max_value=global_batch_size // num_devices)),
        max_accumulation_steps=draw(st.none() | st.integers(min_value=1, max_value=max_batch + 3)),
    )


def all_splits(global_batch_size: int, num_devices: int) -> list[BatchSplit]:
    """Every legal split there is, found by trying every vector of shards."""
    return [
        BatchSplit(global_batch_size=global_batch_size, accumulation_steps=accumulation_steps, shard_sizes=shards)
        for accumulation_steps in range(1, global_batch_size + 1)
        for shards in product(range(-(-global_batch_size // accumulation_steps) + 1), repeat=num_devices)
        if sum(shards) == -(-global_batch_size // accumulation_steps)
    ]


def belongs(split: BatchSplit, space: SplitSpace) -> bool:
    """What a space promises, in words of its own: bounds kept, and for ``gpu0`` the others even, larger first."""
    others = list(split.shard_sizes[1:])
    even_rest = not others or (max(others) - min(others) <= 1 and others == sorted(others, reverse=True))
    most_steps = space.max_accumulation_steps or split.accumulation_steps
    return (
        min(split.shard_sizes) >= space.min_shard_size
        and split.accumulation_steps <= most_steps
        and (space.shares == "each" or even_rest)
    )


@given(spaces())
def test_a_space_is_exactly_the_splits_it_promises(space: SplitSpace) -> None:
    """Iteration, `in` and a count by force agree, in both modes and for all bounds."""
    legal = all_splits(space.global_batch_size, space.num_devices)
    expected = {split for split in legal if belongs(split, space)}
    iterated = list(space)
    assert set(iterated) == expected
    assert {split for split in legal if split in space} == expected
    assert len(iterated) == len(space) == len(expected)


@given(spaces(max_batch=40))
def test_len_counts_what_iteration_yields_and_all_are_distinct(space: SplitSpace) -> None:
    """Also in larger spaces the count is right and no split comes twice."""
    iterated = list(islice(space, 20_000))
    assert len(iterated) == min(len(space), 20_000)
    assert len(set(iterated)) == len(iterated)
    assert all(split in space for split in iterated)


@given(spaces(max_batch=30, max_devices=3))
def test_fewest_accumulation_steps_come_first(space: SplitSpace) -> None:
    """The order of iteration is by accumulation steps."""
    steps = [split.accumulation_steps for split in space]
    assert steps == sorted(steps)


@given(
    global_batch_size=st.integers(min_value=1, max_value=40),
    num_devices=st.integers(min_value=1, max_value=3),
    shares=st.sampled_from(["gpu0", "each"]),
)
def test_every_number_of_accumulation_steps_is_present(global_batch_size: int, num_devices: int, shares: Any) -> None:
    """Without bounds the space holds every k from 1 to B, divisor or not."""
    space = SplitSpace(global_batch_size=global_batch_size, num_devices=num_devices, shares=shares)
    assert {split.accumulation_steps for split in space} == set(range(1, global_batch_size + 1))


@given(spaces(max_batch=30, max_devices=3))
def test_the_even_split_is_in_the_space_wherever_any_split_is(space: SplitSpace) -> None:
    """At every k that has a split, `even_splits` has the even one, fewest steps first: the baseline is a candidate."""
    expected = [
        BatchSplit.even(global_batch_size=space.global_batch_size, accumulation_steps=k, num_devices=space.num_devices)
        for k in sorted({split.accumulation_steps for split in space})
    ]
    assert list(space.even_splits()) == expected
    assert all(split in space for split in expected)


@given(spaces(max_batch=10))
def test_gpu0_shares_are_among_each_devices_own_shares(space: SplitSpace) -> None:
    """The classic space lies within the full one."""
    full = SplitSpace(
        global_batch_size=space.global_batch_size,
        num_devices=space.num_devices,
        shares="each",
        min_shard_size=space.min_shard_size,
        max_accumulation_steps=space.max_accumulation_steps,
    )
    assert all(split in full for split in space)
    assert len(space) <= len(full)


def test_docstring_example() -> None:
    """4 samples on 2 devices: 5 + 3 + 3 + 2 splits."""
    space = SplitSpace(global_batch_size=4, num_devices=2)
    per_steps = [sum(split.accumulation_steps == k for split in space) for k in (1, 2, 3, 4)]
    assert (per_steps, len(space)) == ([5, 3, 3, 2], 13)


def test_one_device_has_one_split_for_each_number_of_steps() -> None:
    """On one device only the accumulation is left to choose."""
    space = SplitSpace(global_batch_size=6, num_devices=1)
    assert [split.shard_sizes for split in space] == [(6,), (3,), (2,), (2,), (2,), (1,)]


def test_a_huge_space_is_counted_and_asked_without_being_enumerated() -> None:
    """512 samples on 8 devices, each its own share: more than 10**15 splits, counted by formula, iterated lazily."""
    space = SplitSpace(global_batch_size=512, num_devices=8, shares="each", max_accumulation_steps=4)
    assert len(space) == sum(comb(m + 7, 7) for m in (512, 256, 171, 128))
    assert next(iter(space)).shard_sizes == (0,) * 7 + (512,)
    assert BatchSplit.even(global_batch_size=512, accumulation_steps=3, num_devices=8) in space


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param(BatchSplit.even(global_batch_size=8, accumulation_steps=2, num_devices=3), id="devices"),
        pytest.param(BatchSplit.even(global_batch_size=9, accumulation_steps=2, num_devices=2), id="global batch"),
        pytest.param(BatchSplit.even(global_batch_size=8, accumulation_steps=5, num_devices=2), id="steps"),
        pytest.param(BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(0, 4)), id="smallest shard"),
        pytest.param((8, 2, (2, 2)), id="not a split"),
        pytest.param(None, id="nothing"),
    ],
)
def test_strangers_are_not_in_the_space(stranger: object) -> None:
    """Another batch, other devices, too many steps, too small a shard, or no split at all: plainly False."""
    space = SplitSpace(global_batch_size=8, num_devices=2, min_shard_size=1, max_accumulation_steps=4)
    assert BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 3)) in space
    assert stranger not in space


def test_numpys_integers_are_integers() -> None:
    """Bounds out of an array are taken, and kept as plain integers."""
    bounds = {"global_batch_size": 8, "num_devices": 2, "min_shard_size": 1, "max_accumulation_steps": 4}
    space = SplitSpace(**{name: np.int64(bound) for name, bound in bounds.items()})
    assert space == SplitSpace(**bounds)
    assert {type(getattr(space, name)) for name in bounds} == {int}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_devices": 2.0}, r"num_devices is 2\.0: expected an integer of at least 1\."),
        ({"max_accumulation_steps": True}, r"max_accumulation_steps is True: expected an integer of at least 1\."),
        ({"global_batch_size": 0}, "global_batch_size is 0: expected an integer of at least 1"),
        ({"num_devices": 0}, r"num_devices is 0: expected an integer of at least 1\."),
        ({"shares": "even"}, r"shares is 'even': expected one of \('gpu0', 'each'\)\."),
        ({"min_shard_size": -1}, r"min_shard_size is -1: expected an integer of at least 0\."),
        ({"max_accumulation_steps": 0}, r"max_accumulation_steps is 0: expected an integer of at least 1\."),
        (
            {"min_shard_size": 5},
            r"2 devices x min_shard_size 5 = 10 samples, more than the global batch of 8\. Lower min_shard_size or",
        ),
    ],
)
def test_bounds_that_leave_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    """Each error names the bound, what it got, what is expected; an empty space says how to fill it."""
    legal: dict[str, Any] = {"global_batch_size": 8, "num_devices": 2}
    with pytest.raises(InvalidSplitError, match=message):
        SplitSpace(**(legal | fields))
