"""Micro-batches of any size, made from a few of the loader's batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from splittune.errors import ConfigError, add_note
from splittune.parallel.nesting import map_tensors, tensors_of
from splittune.parallel.samples import Samples, read_samples, select_batch

# Enough to meet a long sequence in a shuffled loader, few enough to be read in a moment.
NUM_BATCHES_READ = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The most expensive of the batches that were read: what trials are run on.

    It has the most elements per sample. A padded batch of long sequences needs more memory than a
    short one, and the split must hold for both.
    """

    batch: Any
    batch_size: int
    loader_batch_size: int
    """Samples of the largest batch that was read: the loader's own size."""
    are_listed: bool | None = None
    """Whether its samples are in lists, one tensor or record each; None to see what the tensors'
    sizes say."""

    def micro_batch(self, num_samples: int) -> Any:
        """A batch of `num_samples`: the first of the loader's, over again where it has fewer.

        It is a batch of its own, not a part of the loader's: virtual devices tell the two apart.
        """
        return self.batch if num_samples == self.batch_size else self._of(range(num_samples))

    def copies(self, num_samples: int) -> Any:
        """The loader's first sample, so many times over."""
        return self._of([0] * num_samples)

    def _of(self, indices: Iterable[int]) -> Any:
        """A batch of those samples, counted on where the loader's ends."""
        within = [index % self.batch_size for index in indices]
        chosen = select_batch(self.batch, within, batch_size=self.batch_size, listed=self.are_listed)
        # what was picked out is new memory: pinned as the loader's is, or its way to the cards would take longer
        is_pinned = any(tensor.is_pinned() for _, tensor in tensors_of(self.batch))
        return (
            map_tensors(lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor, chosen)
            if is_pinned
            else chosen
        )


def read_batches(loader: Iterable[Any], num_batches: int = NUM_BATCHES_READ) -> SampleBatch:
    """Read up to `num_batches` from `loader`, which is only iterated, and keep the most expensive.

    Where a batch can be read in two ways, 16 images of 3 channels say, the loader's own batch size
    decides.

    Raises:
        ConfigError: the loader is a one-shot iterator (its batches would be lost to training),
            cannot be iterated, or is empty; or a batch has no tensor, or tensors of different
            sizes.
        Exception: the loader's own, with a note.
    """
    if isinstance(loader, Iterator):
        raise ConfigError(
            f"loader is a {type(loader).__name__}, an iterator: reading it would take batches away from training. "
            "Expected what can be iterated over again, a DataLoader or a list of batches. Pass that instead of "
            "iter(it)."
        )
    given: object = loader
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        raise ConfigError(
            f"loader is a {type(loader).__name__}, which cannot be iterated: expected a DataLoader or a list "
            "of batches."
        )
    best: tuple[float, Any, Samples] | None = None
    largest, expected, listed = 0, batch_size_given(loader), None
    for number, batch in enumerate(_batches_of(loader, num_batches)):
        try:
            samples = read_samples(batch, expected=expected, listed=listed)
        except ConfigError as error:
            raise ConfigError(f"batch {number} of the loader: {error}") from error
        size = samples.size
        if size == 0:
            raise ConfigError(f"batch {number} of the loader has 0 samples: expected at least 1. Drop empty batches.")
        largest, listed = max(largest, size), samples.are_listed if samples.is_certain else listed
        cost = sum(tensor.numel() for _, tensor in tensors_of(batch)) / size
        if best is None or (cost, size) > (best[0], best[2].size):
            best = (cost, batch, samples)
    if best is None:
        raise ConfigError("the loader is empty: expected at least one batch. Check its data set and drop_last.")
    _, batch, samples = best
    return SampleBatch(batch=batch, batch_size=samples.size, loader_batch_size=largest, are_listed=samples.are_listed)


def _batches_of(loader: Iterable[Any], num_batches: int) -> Iterator[Any]:
    """The first batches; an exception of the loader's says that it is."""
    number = 0
    try:
        for batch in itertools.islice(loader, num_batches):
            yield batch
            number += 1
    except Exception as error:
        add_note(error, f"splittune: the job's loader raised this when it was asked for batch {number}.")
        raise


def batch_size_given(loader: Any) -> int | None:
    """The batch size that a loader says it has; None for one that says none."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(owner, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None
