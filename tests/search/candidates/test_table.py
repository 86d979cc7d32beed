from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.search.candidates.table import (
    MAX_LISTED,
    MAX_SHARES_PER_MICRO_BATCH,
    SplitTable,
    can_be_listed,
    concatenate,
    even_table,
    gpu0_table,
    listed_table,
    micro_batches,
    open_rows,
    singles_table,
)
from splittune.split import BatchSplit, SplitSpace
from tests.search.spaces import failures, spaces, undominated


def splits_of(table: SplitTable) -> list[BatchSplit]:
    return [table.split(row) for row in range(len(table))]


@given(global_batch_size=st.integers(1, 400), most=st.none() | st.integers(1, 500))
def test_every_size_of_the_micro_batch_comes_with_its_fewest_steps(global_batch_size: int, most: int | None) -> None:
    """Each largest micro-batch there is, largest first, with the smallest k that has it: as going
    through all k finds."""
    space = SplitSpace(global_batch_size=global_batch_size, num_devices=1, max_accumulation_steps=most)
    fewest: dict[int, int] = {}
    for k in range(1, min(most or global_batch_size, global_batch_size) + 1):
        fewest.setdefault(-(-global_batch_size // k), k)
    assert list(micro_batches(space)) == [(k, m) for m, k in fewest.items()]


def test_16_samples_have_seven_sizes() -> None:
    """The worked example: 5 and 7 steps have the micro-batches of 4 and 6."""
    space = SplitSpace(global_batch_size=16, num_devices=1)
    assert list(micro_batches(space)) == [(1, 16), (2, 8), (3, 6), (4, 4), (6, 3), (8, 2), (16, 1)]


@given(space=spaces("gpu0"))
def test_the_splits_that_vary_gpu0_are_the_space_without_the_dominated(space: SplitSpace) -> None:
    """Each split that can be the best is listed once, fewest steps first, and nothing else is."""
    listed = splits_of(gpu0_table(space))
    assert sorted(listed, key=str) == sorted(undominated(space), key=str)
    assert [split.accumulation_steps for split in listed] == sorted(split.accumulation_steps for split in listed)


@given(space=spaces("each"))
def test_small_spaces_of_all_shares_are_listed_whole(space: SplitSpace) -> None:
    """Where every card may have its own share, and there are few, the list holds every split that can be the best."""
    assert can_be_listed(space)
    assert splits_of(listed_table(space)) == undominated(space)


@given(space=spaces())
def test_even_splits_are_those_of_the_space(space: SplitSpace) -> None:
    """One for each size of the micro-batch, fewest steps first; the first is the space's."""
    evens = splits_of(even_table(space))
    kept = set(undominated(space))
    assert evens == [split for split in space.even_splits() if split in kept]


def test_large_spaces_of_all_shares_are_listed_by_gpu0s() -> None:
    """Of 64 samples over 8 cards there are 1.3 billion splits: listed are those that vary GPU 0's share."""
    space = SplitSpace(global_batch_size=64, num_devices=8, shares="each")
    assert not can_be_listed(space)
    table = listed_table(space)
    assert splits_of(table) == splits_of(gpu0_table(replace(space, shares="gpu0")))
    assert len(table) <= MAX_LISTED


def test_huge_batches_vary_gpu0s_share_in_grains() -> None:
    """Of 100,000 samples GPU 0's share moves by 98; the even split, nothing and all are there in any case."""
    space = SplitSpace(global_batch_size=100_000, num_devices=3)
    table = gpu0_table(space)
    whole = table.where(table.steps == 1)
    gpu0 = np.sort(whole.shards[:, 0])
    assert len(whole) <= MAX_SHARES_PER_MICRO_BATCH + 3
    assert (np.diff(gpu0) <= 98).all()
    assert (gpu0[0], gpu0[-1]) == (0, 100_000)
    assert whole.is_any_of([next(space.even_splits())]).any()
    assert all(split in space for split in splits_of(whole)[::100])
    fine = table.where(table.micro_batch_sizes <= MAX_SHARES_PER_MICRO_BATCH)
    assert fine.where(fine.micro_batch_sizes == 1000).shards[:, 0].tolist() == list(range(1001))


@given(data=st.data(), space=spaces())
def test_open_rows_are_those_that_no_trial_measured_or_ruled_out(data: st.DataObject, space: SplitSpace) -> None:
    """All rows at once are judged as one by one; `rules_out` has a test of its own."""
    trials = data.draw(st.lists(failures(space), max_size=3))
    table = listed_table(space)
    one_by_one = [
        not any(trial.split == split or trial.rules_out(split) for trial in trials) for split in table.splits()
    ]
    assert open_rows(table, trials).tolist() == one_by_one


def test_singles_are_one_card_for_all() -> None:
    """Where cards may idle and have their own shares, each alone is a candidate; else there is none."""
    space = SplitSpace(global_batch_size=3, num_devices=2, shares="each")
    assert {split.shard_sizes for split in splits_of(singles_table(space))} == {(m, 0) for m in (1, 2, 3)} | {
        (0, m) for m in (1, 2, 3)
    }
    assert all(split in space for split in splits_of(singles_table(space)))
    for none in (replace(space, shares="gpu0"), replace(space, min_shard_size=1), replace(space, num_devices=1)):
        assert len(singles_table(none)) == 0


@given(space=spaces())
def test_tables_are_joined_without_doubles(space: SplitSpace) -> None:
    """Joined to itself and its even splits a table has each split once, fewest steps first."""
    table = listed_table(space)
    joined = splits_of(concatenate(table, even_table(space), table))
    assert len(set(joined)) == len(joined)
    assert set(joined) == set(splits_of(table)) | set(splits_of(even_table(space)))
    assert [split.accumulation_steps for split in joined] == sorted(split.accumulation_steps for split in joined)


def test_sizes_and_rows_of_a_table() -> None:
    """A row is read back as its split, and its micro-batch is the sum of its shards."""
    table = gpu0_table(SplitSpace(global_batch_size=2, num_devices=2))
    assert table.micro_batch_sizes.tolist() == pytest.approx([2, 2, 2, 1, 1])
    assert table.split(1) == BatchSplit(global_batch_size=2, accumulation_steps=1, shard_sizes=(1, 1))
    assert table.is_any_of([table.split(3)]).tolist() == [False, False, False, True, False]
