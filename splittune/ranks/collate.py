"""One rank's part of a global batch that every rank has read whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from splittune.errors import ConfigError
from splittune.parallel.samples import read_samples, select_batch
from splittune.split import BatchSplit, rank_part


class PartOf(NamedTuple):
    """A rank's part of a global batch, and how large that is."""

    num_samples: int
    batch: Any


class Collated(NamedTuple):
    """A rank's own samples, and whether they are listed where their number alone cannot tell."""

    batch: Any
    are_listed: bool | None


class Telling:
    """Collates, and says which way a batch is meant that can be read both ways; for a loader's ``collate_fn``.

    Three listed images of (3, 8, 8) have as many samples stacked: of these, collated once more with a fourth, it is
    read which they are. Other batches are collated once.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._listed: bool | None = None

    def __call__(self, samples: Sequence[Any]) -> Collated:
        batch = self._collate(list(samples))
        if self._listed is None and _is_ambiguous(batch, len(samples)):
            more = self._collate([*samples, samples[0]])
            self._listed = read_samples(more, expected=len(samples) + 1).are_listed
        return Collated(batch, self._listed)


def _is_ambiguous(batch: Any, num_samples: int) -> bool:
    try:
        one_way, other = (read_samples(batch, expected=num_samples, listed=listed) for listed in (False, True))
    except ConfigError:  # whoever cuts it says so
        return False
    return one_way.size == other.size and one_way.are_listed != other.are_listed


class PartOfSamples:
    """Collates only this rank's of the samples of a global batch; for a loader's ``collate_fn``.

    Worked: of 5 samples, tuned for 8 in 2 micro-batches of 1 + 3, rank 0 collates the first, and
    once more as the stand-in.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], split: BatchSplit, rank: int) -> None:
        self._collate, self._split, self._rank = Telling(collate), split, rank

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
