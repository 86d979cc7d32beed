from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.search import Candidates
from splittune.split import BatchSplit, SplitSpace


@st.composite
def spaces(draw: st.DrawFn) -> SplitSpace:
    num_devices = draw(st.integers(1, 4))
    smallest = draw(st.integers(0, 2))
    return SplitSpace(
        global_batch_size=draw(st.integers(max(1, num_devices * smallest), 24)),
        num_devices=num_devices,
        shares=draw(st.sampled_from(["gpu0", "each"])),
        min_shard_size=smallest,
        max_accumulation_steps=draw(st.none() | st.integers(1, 30)),
    )


@given(space=spaces())
def test_lists_the_space_in_its_own_order(space: SplitSpace) -> None:
    """A space that is small enough is listed whole and in order."""
    candidates = Candidates(space)
    assert list(candidates) == list(space)
    assert not candidates.is_thinned
    assert candidates.even_splits == tuple(space.even_splits())


@given(space=spaces())
def test_index_and_ranges_agree_with_the_list(space: SplitSpace) -> None:
    """Every split is found at its index, and the ranges of the accumulation steps cover the list once."""
    candidates = Candidates(space)
    assert [candidates.index(split) for split in candidates] == list(range(len(candidates)))
    assert [index for steps in candidates.steps for index in candidates.at(steps)] == list(range(len(candidates)))
    assert all(candidates[i].accumulation_steps == steps for steps in candidates.steps for i in candidates.at(steps))


@given(space=spaces(), limit=st.integers(1, 40))
def test_thinned_list_is_legal_ordered_and_keeps_even_splits(space: SplitSpace, limit: int) -> None:
    """A thinned list holds legal, distinct splits in the order of the space, each micro-batch's even split included."""
    candidates = Candidates(space, limit=limit)
    splits = list(candidates)
    assert all(split in space for split in splits)
    assert splits == sorted(set(splits), key=lambda split: (split.accumulation_steps, split.shard_sizes))
    kept = {split.micro_batch_size for split in candidates.even_splits}
    assert kept == {split.micro_batch_size for split in space.even_splits()}
    assert candidates.even_splits[0] == next(space.even_splits())


@pytest.fixture(scope="module")
def large() -> Candidates:
    """Of 64 samples over 8 devices, each with its own share: 1.3 billion splits."""
    return Candidates(SplitSpace(global_batch_size=64, num_devices=8, shares="each"))


@pytest.mark.parametrize(
    "space",
    [
        SplitSpace(global_batch_size=30_000, num_devices=8),
        SplitSpace(global_batch_size=256, num_devices=32, shares="each", min_shard_size=1),
    ],
    ids=str,
)
def test_large_spaces_are_thinned_to_a_list_that_can_be_searched(space: SplitSpace) -> None:
    """A space of a billion splits becomes a list of a practical length, with distinct micro-batches only."""
    candidates = Candidates(space)
    assert candidates.is_thinned
    assert 1000 < len(candidates) < 300_000
    micro_batches = [split.micro_batch_size for split in candidates.even_splits]
    assert len(set(micro_batches)) == len(micro_batches)


def test_thinned_each_holds_the_gpu0_splits(large: Candidates) -> None:
    """Where every device has its own share, the splits that vary only GPU 0's stay in the list to the sample."""
    assert large.is_thinned
    first = list(SplitSpace(global_batch_size=64, num_devices=8, max_accumulation_steps=1))
    assert all(split in large for split in first)


def test_near_rounds_to_grains_in_a_thinned_list(large: Candidates) -> None:
    """In a thinned list a split between the grains is replaced by one within a grain of it."""
    assert large.find(1, (1, 11, 13, 9, 7, 9, 9, 5)) is None
    index = large.near(1, (1, 11, 13, 9, 7, 9, 9, 5))
    assert index is not None
    assert large[index].shard_sizes == (0, 8, 16, 8, 8, 8, 8, 8)


def test_near_finds_only_what_is_there_in_a_whole_list() -> None:
    """In a whole list there is no rounding: a split that is not legal is no candidate."""
    candidates = Candidates(SplitSpace(global_batch_size=8, num_devices=2, min_shard_size=1))
    assert candidates.near(1, (0, 8)) is None
    assert candidates.near(1, (1, 7)) == 0


def test_nearest_takes_the_least_different_shards() -> None:
    """The nearest candidate has the least sum of differences, and of equals the first."""
    candidates = Candidates(SplitSpace(global_batch_size=10, num_devices=2))
    assert candidates.nearest((5, 5), [0, 3, 7]) == 3
    assert candidates.nearest((5, 5), []) is None


def test_index_of_a_foreign_split_is_refused() -> None:
    """A split of another batch is no candidate."""
    candidates = Candidates(SplitSpace(global_batch_size=10, num_devices=2))
    other = BatchSplit(global_batch_size=12, accumulation_steps=1, shard_sizes=(6, 6))
    assert other not in candidates
    with pytest.raises(ValueError, match="no candidate"):
        candidates.index(other)
