"""A loader's batch cut into the micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from splittune.errors import ConfigError
from splittune.parallel.samples import read_samples, slice_batch
from splittune.split import BatchSplit, micro_batch_sizes_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """A part of a batch, to be run forward and backward at once."""

    batch: Any
    """Nested as the whole batch is; its tensors are views of the batch's, still where the loader
    put them."""
    weight: float
    """Its samples (or tokens) over those of the whole batch: a mean loss times this, summed, is
    that of the batch."""


def _samples(_batch: Any, num_samples: int) -> float:
    return num_samples


def cut_batch(
    batch: Any, split: BatchSplit, weigh: Callable[[Any, int], float] = _samples, *, listed: bool | None = None
) -> Iterator[MicroBatch]:
    """`batch` cut into the micro-batches of one optimizer step; see `SplitConfig.micro_batches`.

    `weigh(batch, num_samples)` says how much a batch or a part of it counts: its samples, unless
    told otherwise. What counts 0 is left out. `listed` says whether batches of this job hold lists
    of samples, where it is known.

    Raises:
        ConfigError: at the call: no sample or too many, no tensor, or tensors whose sizes differ.
    """
    samples = read_samples(batch, expected=split.global_batch_size, listed=listed)
    sizes = micro_batch_sizes_of(samples.size, split)
    whole = weigh(batch, sum(sizes))
    if not whole:
        raise ConfigError("the batch counts 0 by weight_fn: expected more, there is nothing to learn from. Skip it.")
    return _parts(batch, sizes, weigh, whole, samples.are_listed)


def _parts(
    batch: Any, sizes: Sequence[int], weigh: Callable[[Any, int], float], whole: float, listed: bool
) -> Iterator[MicroBatch]:
    start = 0
    for size in sizes:
        part = slice_batch(batch, start, start + size, batch_size=sum(sizes), listed=listed)
        start += size
        weight = weigh(part, size)
        if weight:  # a mean over no tokens is NaN, and weighing it by 0 does not help
            yield MicroBatch(batch=part, weight=weight / whole)
