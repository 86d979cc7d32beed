"""A loader that cannot be shared out is refused at once: what it is, what was expected, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterDataPipe, SequentialSampler

from splittune.errors import ConfigError
from splittune.ranks import ShardedLoader
from tests.ranks.loaders import SPLIT, put_together, shared_out, shuffled


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Pipe(IterDataPipe[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


class DataLoaderShard(DataLoader[Any]):
    """Named as Accelerate names what it has prepared."""


def distributed(num_replicas: int) -> DataLoader[Any]:
    return DataLoader(range(16), 8, sampler=DistributedSampler(range(16), num_replicas=num_replicas, rank=0))


def around_distributed() -> DataLoader[Any]:
    sampler = DistributedSampler(range(16), num_replicas=2, rank=0)
    return DataLoader(range(16), batch_sampler=BatchSampler(sampler, 8, False))


@pytest.mark.parametrize(
    ("loader", "complaint"),
    [
        ([torch.zeros(8)], "loader is a list: expected a torch.utils.data.DataLoader.*DataLoader.dataset, batch_size"),
        (iter([]), "loader is a list_iterator: expected a torch.utils.data.DataLoader"),
        (None, "loader is a NoneType: expected"),
        (shuffled().dataset, "loader is a range: expected"),
        (DataLoader(range(8), batch_size=4), "batch size is 4, and the config was tuned for 8 .*on all ranks together"),
        (
            DataLoader(range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 16, False)),
            "batch size is 16, and the config was tuned for 8",
        ),
        (distributed(2), "DistributedSampler for 2 ranks, .*expected the loader of one device.*Leave the sampler out"),
        (around_distributed(), "DistributedSampler for 2 ranks"),
        (
            DataLoaderShard(range(8), batch_size=8),
            "DataLoaderShard, which Accelerate has shared out among ranks already",
        ),
        (OwnIteration(range(8), batch_size=8), "OwnIteration, which iterates in a way of its own"),
        (DataLoader(Pipe(), batch_size=8), "data pipe, which torch shards among ranks itself"),
        (DataLoader(Unsized(), batch_size=8), "Unsized without a length, and its loader's SequentialSampler needs one"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(loader: Any, complaint: str) -> None:
    """Before anything of it is read."""
    with pytest.raises(ConfigError, match=complaint):
        ShardedLoader(loader, SPLIT, rank=0, num_ranks=2)


def test_what_is_shared_out_already_is_refused() -> None:
    """A sharded loader is none to shard."""
    sharded: Any = ShardedLoader(shuffled(), SPLIT, rank=0, num_ranks=2)
    with pytest.raises(ConfigError, match="a ShardedLoader, shared out already"):
        ShardedLoader(sharded, SPLIT, rank=0, num_ranks=2)


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        (
            {"rank": 0, "num_ranks": 3},
            "3 ranks for 8 = 2 x .1 . 3., which has 2 shards.*Start 2 processes, or tune for 3",
        ),
        ({"rank": 2, "num_ranks": 2}, "rank is 2: expected at most 1"),
        ({"rank": -1, "num_ranks": 2}, "rank is -1"),
        ({"rank": 0, "num_ranks": 0}, "num_ranks is 0"),
        ({"rank": 0, "num_ranks": 2, "seed": -1}, "seed is -1"),
    ],
)
def test_ranks_that_do_not_fit_the_split_are_refused(ranks: dict[str, int], complaint: str) -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match=complaint):
        ShardedLoader(shuffled(), SPLIT, **ranks)


def test_a_distributed_sampler_of_one_rank_shares_nothing_out() -> None:
    """Some set one up always; of one rank it gives every sample."""
    found = put_together(*map(list, shared_out(lambda: distributed(1))))
    assert sorted(sample for batch in found for sample in batch) == list(range(16))


def test_a_sampler_that_knows_the_indices_needs_no_length() -> None:
    """Of a data set without one."""
    ranks = shared_out(lambda: DataLoader(Unsized(), batch_size=8, sampler=range(10)))
    assert put_together(*map(list, ranks)) == [list(range(8)), [8, 9]]
    assert ranks[0].facts()["samples in the data set"] == "unknown"
