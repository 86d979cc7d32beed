"""One rank's part of a global batch that every rank has read whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from splittune.parallel.samples import read_samples, select_batch
from splittune.split import BatchSplit, rank_part


class PartOf(NamedTuple):
    """A rank's part of a global batch, and how large that is."""

    num_samples: int
    batch: Any


class PartOfSamples:
    """Collates only this rank's of the samples of a global batch; for a loader's ``collate_fn``.

    Worked: of 5 samples, tuned for 8 in 2 micro-batches of 1 + 3, rank 0 collates the first, and
    once more as the stand-in.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], split: BatchSplit, rank: int) -> None:
        self._collate, self._split, self._rank = collate, split, rank

    def __call__(self, samples: Sequence[Any]) -> PartOf:
        part = rank_part(len(samples), self._split, self._rank)
        return PartOf(len(samples), self._collate([samples[position] for position in part.positions_to_load]))


class PartOfBatch:
    """Takes this rank's samples out of a whole batch; for a loader's ``collate_fn``.

    They are copies, nested as the batch is: see `select_batch`.

    Raises:
        ConfigError: at the call: no sample or more than the split was tuned for, no tensor, or
            tensors whose sizes differ.
    """

    def __init__(self, convert: Callable[[Any], Any], split: BatchSplit, rank: int) -> None:
        self._convert, self._split, self._rank = convert, split, rank
        self._listed: bool | None = None

    def __call__(self, batch: Any) -> PartOf:
        batch = self._convert(batch)
        samples = read_samples(batch, expected=self._split.global_batch_size, listed=self._listed)
        if samples.is_certain:
            self._listed = samples.are_listed
        part = rank_part(samples.size, self._split, self._rank)
        own = select_batch(batch, part.positions_to_load, batch_size=samples.size, listed=samples.are_listed)
        return PartOf(samples.size, own)
