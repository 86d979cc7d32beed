"""Data sets, splits and loaders that tests of sharded loaders share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from splittune.ranks import RankShare, ShardedLoader
from splittune.split import BatchSplit

SPLIT = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 3))


class Numbers(Dataset[int]):
    """0, 1, 2, ...; it notes what was loaded, and the epoch it was told."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.loaded: list[int] = []
        self.epoch: int | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Seeds(Dataset[int]):
    """The seed of the worker that loads the sample."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return get_worker_info().seed


class Stream(IterableDataset[int]):
    """0, 1, 2, ... in an order that is drawn from the generators that everybody shares; each worker has its part."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        own = torch.arange(self.num_samples)[first::step]
        for index in torch.randperm(len(own)).tolist():
            yield int(own[index])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shuffled(num_samples: int = 21, seed: int = 5, **options: Any) -> DataLoader[Any]:
    """In batches of 8, by a generator of the loader's own."""
    return DataLoader(range(num_samples), batch_size=8, shuffle=True, generator=seeded(seed), **options)


def shared_out(make: Any, split: BatchSplit = SPLIT, **options: Any) -> list[ShardedLoader]:
    """One loader a rank, each of a loader of its own, as every process makes one."""
    num_ranks = split.num_devices
    return [ShardedLoader(make(), split, rank=rank, num_ranks=num_ranks, **options) for rank in range(num_ranks)]


def own_samples(share: RankShare) -> list[list[int]]:
    """The samples of each micro-batch."""
    assert len(share.batch) == sum(share.sizes) + share.has_stand_in
    rest = share.batch.tolist()
    return [[rest.pop(0) for _ in range(size)] for size in share.sizes]


def put_together(*epochs: list[RankShare]) -> list[list[int]]:
    """The global batches, from what each rank got."""
    batches = []
    for shares in zip(*epochs, strict=True):
        assert len({(share.micro_batch_sizes, share.num_samples) for share in shares}) == 1
        parts = [own_samples(share) for share in shares]
        batches.append([sample for micro in zip(*parts, strict=True) for own in micro for sample in own])
        assert len(batches[-1]) == shares[0].num_samples
    return batches


def as_lists(loader: DataLoader[Any]) -> list[list[int]]:
    """One epoch of one device."""
    return [batch.tolist() for batch in loader]
