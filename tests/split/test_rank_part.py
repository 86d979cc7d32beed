"""One rank's samples of a global batch: together the ranks have each once, and nobody exceeds a tuned share."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splittune.errors import ConfigError
from splittune.split import BatchSplit, RankPart, micro_batch_sizes_of, rank_part


@st.composite
def splits_and_samples(draw: st.DrawFn) -> tuple[BatchSplit, int]:
    """Any legal split over up to six ranks, and a batch that it can take."""
    batch = draw(st.integers(1, 200))
    steps = draw(st.integers(1, batch))
    largest, shards = -(-batch // steps), []
    for _ in range(draw(st.integers(0, 5))):
        shards.append(draw(st.integers(0, largest - sum(shards))))
    order = draw(st.permutations([*shards, largest - sum(shards)]))
    split = BatchSplit(global_batch_size=batch, accumulation_steps=steps, shard_sizes=tuple(order))
    return split, draw(st.integers(1, batch))


def parts(split: BatchSplit, num_samples: int) -> list[RankPart]:
    return [rank_part(num_samples, split, rank) for rank in range(split.num_devices)]


SPLIT = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 3))


def test_docstring_example() -> None:
    """Of 5 samples rank 0 takes the first, and stands in with it; rank 1 the four others."""
    first, second = parts(SPLIT, 5)
    assert first == RankPart(positions=(0,), stand_in=0, sizes=(1, 0), micro_batch_sizes=(3, 2))
    assert second == RankPart(positions=(1, 2, 3, 4), stand_in=None, sizes=(2, 2), micro_batch_sizes=(3, 2))
    assert first.positions_to_load == (0, 0)


@given(case=splits_and_samples())
@example(case=(SPLIT, 5))
def test_every_micro_batch_is_dealt_out_in_the_order_of_ranks(case: tuple[BatchSplit, int]) -> None:
    """For any split and any batch: rank after rank, the parts of a micro-batch are its positions in order."""
    split, num_samples = case
    dealt, start = parts(split, num_samples), 0
    taken = [list(part.positions) for part in dealt]
    for number, size in enumerate(micro_batch_sizes_of(num_samples, split)):
        found = [position for part, rest in zip(dealt, taken, strict=True) for position in rest[: part.sizes[number]]]
        assert found == list(range(start, start + size))
        taken = [rest[part.sizes[number] :] for part, rest in zip(dealt, taken, strict=True)]
        start += size
    assert taken == [[]] * split.num_devices


@given(case=splits_and_samples())
def test_ranks_run_as_many_micro_batches_and_no_more_than_their_share(case: tuple[BatchSplit, int]) -> None:
    """Each rank is told of every micro-batch, and has at most its tuned share of each."""
    split, num_samples = case
    for part, tuned in zip(parts(split, num_samples), split.shard_sizes, strict=True):
        assert part.micro_batch_sizes == micro_batch_sizes_of(num_samples, split)
        assert len(part.sizes) == len(part.micro_batch_sizes)
        assert max(part.sizes) <= tuned
        assert sum(part.sizes) == len(part.positions)


@given(case=splits_and_samples())
def test_a_stand_in_is_there_only_where_a_rank_has_no_sample(case: tuple[BatchSplit, int]) -> None:
    """It is a position of the same global batch: the rank's own first one where it has any."""
    split, num_samples = case
    for part in parts(split, num_samples):
        if all(part.sizes):
            assert part.stand_in is None
            assert part.positions_to_load == part.positions
        else:
            assert part.stand_in == (part.positions[0] if part.positions else 0)
            assert part.positions_to_load == (*part.positions, part.stand_in)


def fits_without_a_single(num_samples: int, shards: tuple[int, ...]) -> bool:
    """Whether ranks that take none, or from 2 up to their share, can take as many samples, by trying all."""
    sums = {0}
    for shard in shards:
        sums = {total + own for total in sums for own in (0, *range(2, shard + 1))}
    return num_samples in sums


@given(case=splits_and_samples())
@example(case=(BatchSplit(global_batch_size=8, accumulation_steps=1, shard_sizes=(4, 4)), 2))
def test_a_short_micro_batch_leaves_no_rank_a_single_sample(case: tuple[BatchSplit, int]) -> None:
    """BatchNorm has no variance of one: where no tuned share is 1, no rank has 1, unless no other way is left."""
    split, num_samples = case
    dealt = parts(split, num_samples)
    for number, size in enumerate(micro_batch_sizes_of(num_samples, split)):
        if 1 not in split.shard_sizes and fits_without_a_single(size, split.shard_sizes):
            assert 1 not in [part.sizes[number] for part in dealt]


@pytest.mark.parametrize("num_samples", [7, 14])
def test_tuned_shares_of_one_sample_stay(num_samples: int) -> None:
    """Every full micro-batch has the shares that were tuned, those of 1 as well."""
    split = BatchSplit(global_batch_size=14, accumulation_steps=2, shard_sizes=(1, 3, 3))
    assert {part.sizes for part in parts(split, num_samples)} == {(1,) * (num_samples // 7), (3,) * (num_samples // 7)}


@pytest.mark.parametrize(
    ("num_samples", "rank", "complaint"),
    [
        (5, 2, "rank is 2: expected at most 1, for 8 = 2 x .1 . 3. has 2 shards"),
        (5, -1, "rank is -1: expected an integer of at least 0"),
        (9, 0, "9 - 8 = 1 more than"),
        (0, 0, "0 samples"),
    ],
)
def test_a_rank_or_a_batch_out_of_range_is_refused(num_samples: int, rank: int, complaint: str) -> None:
    """With the arithmetic."""
    with pytest.raises(ConfigError, match=complaint):
        rank_part(num_samples, SPLIT, rank)
