"""Which loaders can be shared out among ranks, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
)

from splittune.checks import as_int
from splittune.errors import ConfigError
from splittune.split import BatchSplit

# What Accelerate calls the loaders and samplers that it has shared out.
SHARDED_BY_ACCELERATE = ("DataLoaderShard", "DataLoaderDispatcher", "BatchSamplerShard", "IterableDatasetShard")


def check_shardable(loader: Any, split: BatchSplit) -> None:
    """Refuse what cannot be shared out as `split` says, before anything of it is read.

    Raises:
        ConfigError: no `DataLoader`, one that is shared out already or iterates in its own way,
            batches of another size than the config's, or a data set without the length that its
            sampler needs.
    """
    _check_not_sharded(loader)
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"loader is a {type(loader).__name__}: expected a torch.utils.data.DataLoader, whose samples can be "
            "loaded one by one. Every rank would otherwise make all of every batch. Wrap the data set in one: "
            "DataLoader(dataset, batch_size=..., collate_fn=...)."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"loader is a {type(loader).__name__}, which iterates in a way of its own: expected "
            "torch.utils.data.DataLoader's, for a loader is built anew for every rank. Pass a DataLoader of the same "
            "data set; what it gives has state_dict() and load_state_dict()."
        )
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        raise ConfigError(
            "the loader's data set is a data pipe, which torch shards among ranks itself: expected a Dataset or "
            "IterableDataset that gives every rank the same samples. Wrap the pipe in an IterableDataset."
        )
    _check_batch_size(loader, split)
    _check_length(loader)


def reads_whole_batches(loader: DataLoader[Any]) -> bool:
    """Whether every rank must read all: the samples of streams and whole batches have no index."""
    return isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None


def _check_not_sharded(loader: Any) -> None:
    for part in _parts_of(loader):
        num_replicas = as_int(getattr(part, "num_replicas", None))
        if num_replicas is not None and num_replicas > 1:
            raise ConfigError(
                f"the loader's sampler is a {type(part).__name__} for {num_replicas} ranks, which gives each an equal "
                "part and repeats samples to do so: expected the loader of one device, whose batches are shared out "
                "as they were tuned. Leave the sampler out: DataLoader(dataset, batch_size=..., shuffle=True)."
            )
        if type(part).__name__ in SHARDED_BY_ACCELERATE:
            raise ConfigError(
                f"the loader holds a {type(part).__name__}, which Accelerate has shared out among ranks already: "
                "expected the loader as it was before. Do not pass it to accelerator.prepare()."
            )


def _parts_of(loader: Any) -> Iterator[object]:
    yield loader
    for name in ("dataset", "sampler", "batch_sampler"):
        part = getattr(loader, name, None)
        yield part
        yield getattr(part, "sampler", None)


def _check_batch_size(loader: DataLoader[Any], split: BatchSplit) -> None:
    """Batch samplers of the user's own may vary the size: theirs are checked batch by batch."""
    batch_sampler = loader.batch_sampler
    given = batch_sampler.batch_size if isinstance(batch_sampler, BatchSampler) else loader.batch_size
    if given is not None and given != split.global_batch_size:
        raise ConfigError(
            f"the loader's batch size is {given}, and the config was tuned for {split.global_batch_size} ({split}): "
            f"expected {split.global_batch_size}, the samples of one optimizer step on all ranks together. Set "
            f"DataLoader(batch_size={split.global_batch_size}), or tune for {given}."
        )


def _check_length(loader: DataLoader[Any]) -> None:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, RandomSampler | SequentialSampler) and not hasattr(sampler.data_source, "__len__"):
        raise ConfigError(
            f"the data set is a {type(sampler.data_source).__name__} without a length, and its loader's "
            f"{type(sampler).__name__} needs one: expected a __len__ method. Add it, pass a sampler that knows the "
            "indices, or make the data set an IterableDataset."
        )
