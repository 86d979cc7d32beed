"""A rank's indices: every global batch once, whatever the batches, the shares and the step begun at."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splittune.errors import ConfigError
from splittune.ranks import RankBatchSampler
from splittune.ranks.draws import AgreedDraws
from splittune.ranks.sampler import SameOrder
from splittune.split import BatchSplit

SPLIT = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 3))
BATCHES = [[6, 1, 4, 0, 3, 7, 5, 2], [8, 9, 10, 11, 12]]


def test_docstring_example() -> None:
    """The worked indices, and the sizes of the global batches they are from."""
    first, second = (RankBatchSampler(BATCHES, split=SPLIT, rank=rank) for rank in (0, 1))
    assert list(first) == [[6, 3], [8, 8]]
    assert list(second) == [[1, 4, 0, 7, 5, 2], [9, 10, 11, 12]]
    assert list(first.sizes) == list(second.sizes) == [8, 5]


@st.composite
def batches_and_split(draw: st.DrawFn) -> tuple[list[list[int]], BatchSplit]:
    """Batches of any size up to the split's, of indices that are all unlike."""
    batch, num_ranks = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    steps = draw(st.integers(1, batch))
    owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=-(-batch // steps), max_size=-(-batch // steps)))
    shards = tuple(owners.count(rank) for rank in range(num_ranks))
    sizes = draw(st.lists(st.integers(1, batch), max_size=6))
    indices = iter(draw(st.permutations(range(sum(sizes)))))
    split = BatchSplit(global_batch_size=batch, accumulation_steps=steps, shard_sizes=shards)
    return [[next(indices) for _ in range(size)] for size in sizes], split


@given(case=batches_and_split(), data=st.data())
def test_ranks_load_every_sample_once_from_any_step_on(
    case: tuple[list[list[int]], BatchSplit], data: st.DataObject
) -> None:
    """Together the rest of the batches; each rank as many steps, and one sample more only where one stands in."""
    batches, split = case
    step = data.draw(st.integers(0, len(batches)))
    found = []
    for rank in range(split.num_devices):
        sampler = RankBatchSampler(batches, split=split, rank=rank)
        sampler.begin(AgreedDraws(0), num_skipped=step)
        found.append(list(sampler))
        assert list(sampler.sizes) == [len(batch) for batch in batches[step:]]
    assert all(len(indices) == len(batches) - step for indices in found)
    for batch, *parts in zip(batches[step:], *found, strict=True):
        assert set().union(*parts) == set(batch)
        num_extra = sum(map(len, parts)) - len(batch)
        assert 0 <= num_extra <= split.num_devices


def test_an_iteration_given_up_leaves_the_next_its_own_sizes() -> None:
    """What was given ahead of time and never asked about does not count there."""
    sampler = RankBatchSampler(BATCHES, split=SPLIT, rank=0)
    given_up = iter(sampler)
    next(given_up)
    assert list(sampler) == [[6, 3], [8, 8]]
    assert list(sampler.sizes) == [8, 5]


def test_indices_may_be_anything_that_a_data_set_takes() -> None:
    """Names, pairs, or a tensor of them."""
    named = [["a", ("b", 1), "c", "d", "e", "f", "g", "h"]]
    assert list(RankBatchSampler(named, split=SPLIT, rank=0)) == [["a", "e"]]
    assert list(RankBatchSampler(list(torch.arange(16).split(8)), split=SPLIT, rank=0)) == [[0, 4], [8, 12]]


@pytest.mark.parametrize(
    ("batches", "complaint"),
    [
        ([[1], list(range(9))], "batch 1 of the batch sampler: a batch of 9 samples, 9 - 8 = 1 more than"),
        ([[]], "batch 0 of the batch sampler: a batch of 0 samples"),
    ],
)
def test_a_batch_that_cannot_be_dealt_out_is_refused_by_its_number(batches: list[list[int]], complaint: str) -> None:
    """Batch samplers of the user's own may give any size: up to the tuned one."""
    with pytest.raises(ConfigError, match=complaint):
        list(RankBatchSampler(batches, split=SPLIT, rank=0))


def test_the_same_order_is_drawn_on_every_rank() -> None:
    """By a sampler that draws from the generators that everybody shares, as one by one as it gives."""

    class Coins:
        def __iter__(self):  # type: ignore[no-untyped-def]
            return (int(torch.randint(1000, ())) for _ in range(6))

    found = []
    for rank in range(2):
        order = SameOrder(Coins())
        order.begin(AgreedDraws(7), num_skipped=rank)
        torch.manual_seed(rank)
        found.append(list(order))
    assert found[1] == found[0][1:]
    assert len(found[0]) == 6
