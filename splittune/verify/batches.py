"""The loader's batches as a run takes them: in the config's size, the longest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from splittune.config import SplitConfig
from splittune.errors import ConfigError
from splittune.parallel.nesting import tensors_of
from splittune.parallel.samples import batch_size_of
from splittune.split import micro_batch_sizes_of
from splittune.training import SampleBatch, TrainingTask

# Batches that are trained first. More than one: where all are equally long, it takes a few steps
# until the allocator's cache is settled. A choice.
NUM_LONGEST = 3


class RunBatches:
    """The batches of one task, for a run under one config.

    Where the task's `global_batch_size` is another one than its loader's, each batch is cut, or its
    samples are repeated, to that size; a short batch in proportion. With 20 instead of 8 samples, a
    last batch of 4 becomes one of 10.

    Raises:
        ConfigError: the config was tuned for batches of another size.
    """

    def __init__(self, config: SplitConfig, task: TrainingTask, *, loader_batch_size: int) -> None:
        self._split, self._task, self._loader_batch_size = config.split, task, loader_batch_size
        self.notes: tuple[str, ...] = self._check_size()
        self._longest: list[Any] = []

    def find_longest(self, num_batches: int) -> list[Any]:
        """Those of the first `num_batches` whose micro-batches have most elements, largest first.

        They decide the peak. At most `NUM_LONGEST` are kept.
        """
        kept: list[tuple[float, int, Any]] = []
        for number, batch in enumerate(islice(self._round(), num_batches)):
            size = batch_size_of(batch, expected=self._split.global_batch_size)
            micro_batch_size = micro_batch_sizes_of(size, self._split)[0]
            cost = sum(tensor.numel() for _, tensor in tensors_of(batch)) / size * micro_batch_size
            kept = sorted([*kept, (-cost, number, batch)], key=lambda entry: entry[:2])[:NUM_LONGEST]
        self._longest = [batch for _, _, batch in kept]
        return self._longest

    def __iter__(self) -> Iterator[Any]:
        """The longest, then the loader's, round and round without end."""
        yield from self._longest
        while True:
            is_empty = True
            for batch in self._round():
                is_empty = False
                yield batch
            if is_empty:
                raise ConfigError(
                    "the loader gave no batch when it was iterated over again: expected a DataLoader or list."
                )

    def _round(self) -> Iterator[Any]:
        """The loader's batches once, in the size the config is for."""
        for batch in self._task.loader:
            if self._loader_batch_size == self._split.global_batch_size:
                yield batch
            else:
                ratio = self._split.global_batch_size / self._loader_batch_size
                size = batch_size_of(batch, expected=self._loader_batch_size)
                yield resized(batch, math.ceil(size * ratio), expected=self._loader_batch_size)

    def _check_size(self) -> tuple[str, ...]:
        split, wanted, found = self._split, self._task.global_batch_size, self._loader_batch_size
        given = found if wanted is None else wanted
        if given != split.global_batch_size:
            whose = "the loader gives batches of" if wanted is None else "the task's global_batch_size is"
            raise ConfigError(
                f"the config was tuned for batches of {split.global_batch_size} samples ({split}), and {whose} "
                f"{given}: expected {split.global_batch_size}. Is this the job it was tuned for? Set the loader's "
                f"batch size to {split.global_batch_size}, or tune this job."
            )
        if given == found:
            return ()
        note = (
            f"The loader gives batches of {found}, and the global batch size is {given}: their samples were cut or "
            f"repeated to {given}. Training needs a loader of batch size {given}."
        )
        return (note,)


def resized(batch: Any, num_samples: int, *, expected: int) -> Any:
    """The batch's first samples, over again where it has fewer.

    `expected` is the size of a full batch, which tells samples in lists from parts of one sample.
    """
    size = batch_size_of(batch, expected=expected)
    return SampleBatch(batch=batch, batch_size=size, loader_batch_size=size).micro_batch(num_samples)
