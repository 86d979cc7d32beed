"""Streams and whole batches: every rank reads all of them, keeps its part, and is told what that costs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from splittune.errors import ConfigError
from splittune.ranks import RankShare, ShardedLoader
from splittune.split import BatchSplit
from tests.ranks.loaders import SPLIT, Stream, as_lists, put_together, seeded, shared_out

pytestmark = pytest.mark.filterwarnings("ignore:.*is read in full by each of the 2 ranks:UserWarning")


class Batches(Dataset[Tensor]):
    """Whole batches of 8 numbers, the last one shorter."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        if index >= 3:
            raise IndexError(index)
        return torch.arange(21)[8 * index : 8 * index + 8]


class StreamOfBatches(IterableDataset[Any]):
    """Inputs and names of 8 samples, then of 5."""

    def __iter__(self) -> Iterator[Any]:
        for first, size in ((0, 8), (8, 5)):
            yield {"x": torch.arange(first, first + size), "name": [str(first + n) for n in range(size)]}


def test_a_stream_says_once_what_it_costs() -> None:
    """All ranks read all; one rank alone has nothing to be told."""
    with pytest.warns(UserWarning, match="an IterableDataset is read in full by each of the 2 ranks"):
        ShardedLoader(DataLoader(Stream(21), batch_size=8), SPLIT, rank=0, num_ranks=2)
    with pytest.warns(UserWarning, match="a loader of whole batches is read in full by each of the 2 ranks"):
        ShardedLoader(DataLoader(Batches(), batch_size=None), SPLIT, rank=0, num_ranks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(4,))
        ShardedLoader(DataLoader(Stream(21), batch_size=8), alone, rank=0, num_ranks=1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("generator_seed", [None, 5])
def test_a_stream_that_shuffles_gives_the_batches_of_one_device(
    num_workers: int, drop_last: bool, generator_seed: int | None
) -> None:
    """In this process or in workers, each with its part of the stream and a short batch of its own, seeded alike."""

    def make() -> DataLoader[Any]:
        generator = None if generator_seed is None else seeded(generator_seed)
        stream = Stream(29)
        return DataLoader(stream, 8, num_workers=num_workers, drop_last=drop_last, generator=generator)

    alone, ranks = make(), shared_out(make, seed=3)
    for epoch in range(2):
        found = []
        for rank, loader in enumerate(ranks):
            torch.manual_seed(100 + rank)
            found.append(list(loader))
        torch.manual_seed(3 + epoch)
        assert put_together(*found) == as_lists(alone)


def test_a_stream_collates_only_the_ranks_part() -> None:
    """Lists that the user's function makes of it are the rank's."""
    collated: list[list[int]] = []

    def listed(samples: list[int]) -> list[int]:
        collated.append(samples)
        return list(samples)

    loader = ShardedLoader(DataLoader(Stream(8), 8, collate_fn=listed), SPLIT, rank=1, num_ranks=2)
    (share,) = loader
    assert share.batch == collated[0]
    assert len(share.batch) == sum(share.sizes) == 6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_whole_batches_are_shared_out_in_the_samplers_order(num_workers: int) -> None:
    """Each is read by all ranks, shuffled alike."""

    def make() -> DataLoader[Any]:
        return DataLoader(Batches(), batch_size=None, shuffle=True, generator=seeded(5), num_workers=num_workers)

    alone, ranks = make(), shared_out(make)
    for _ in range(2):
        assert put_together(*map(list, ranks)) == as_lists(alone)


def test_whole_batches_of_a_stream_are_cut_with_all_they_hold() -> None:
    """Tensors and lists of one entry a sample; the stand-in too."""
    first, second = map(list, shared_out(partial(DataLoader, StreamOfBatches(), batch_size=None)))
    assert [share.batch["x"].tolist() for share in first] == [[0, 4], [8, 8]]
    assert [share.batch["name"] for share in first] == [["0", "4"], ["8", "8"]]
    assert [share.batch["name"] for share in second] == [["1", "2", "3", "5", "6", "7"], ["9", "10", "11", "12"]]
    assert [(share.sizes, share.num_samples) for share in first] == [((1, 1), 8), ((1, 0), 5)]


def test_what_is_skipped_of_whole_batches_is_not_read() -> None:
    """They have an index each."""
    data = Batches()
    read: list[int] = []
    get = Batches.__getitem__
    data.__class__ = type("Noting", (Batches,), {"__getitem__": lambda self, i: read.append(i) or get(self, i)})
    loader = ShardedLoader(DataLoader(data, batch_size=None), SPLIT, rank=0, num_ranks=2)
    loader.load_state_dict({**loader.state_dict(), "step": 2})
    assert len(list(loader)) == 1
    assert read == [2]


def test_a_whole_batch_that_is_too_large_is_refused() -> None:
    """With the arithmetic, where it is met."""
    loader = ShardedLoader(DataLoader([torch.arange(9)], batch_size=None), SPLIT, rank=0, num_ranks=2)
    with pytest.raises(ConfigError, match="9 - 8 = 1 more than"):
        list(loader)


def test_a_stream_without_a_length_has_none() -> None:
    """As its loader has none; what asks for a hint only, as list() does, goes on."""
    loader = ShardedLoader(DataLoader(Stream(21), 8), SPLIT, rank=0, num_ranks=2)
    with pytest.raises(TypeError):
        len(loader)
    shares: list[RankShare] = list(loader)
    assert len(shares) == 3
    assert loader.facts()["global batches in an epoch"] == "unknown"
