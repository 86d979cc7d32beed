"""The legal, distinct splits of one global batch over a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from typing import Literal, get_args

from splittune.checks import as_int
from splittune.errors import InvalidSplitError
from splittune.split.batch_split import BatchSplit
from splittune.split.shards import shards_with_gpu0

Shares = Literal["gpu0", "each"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSpace:
    """Every `BatchSplit` the search may propose, fewest accumulation steps first.

    Example: 4 samples on 2 devices have 5 + 3 + 3 + 2 = 13 splits, for 1, 2, 3 and 4 accumulation
    steps.

    Args:
        global_batch_size: samples behind one optimizer step.
        num_devices: how many devices share a micro-batch.
        shares: "gpu0" varies GPU 0's share and shares the rest evenly. "each" gives every device a
            share of its own; the count grows as C(m + n - 1, n - 1), so iterate lazily.
        min_shard_size: the fewest samples of a device in the largest micro-batch; at 0 it may idle.
        max_accumulation_steps: None for no limit.

    Raises:
        InvalidSplitError: a bound is no integer or out of range, or no split is left.
    """

    global_batch_size: int
    num_devices: int
    shares: Shares = "gpu0"
    min_shard_size: int = 0
    max_accumulation_steps: int | None = None

    def __post_init__(self) -> None:
        self._check_bound("num_devices", at_least=1)
        if self.shares not in get_args(Shares):
            raise InvalidSplitError(f"shares is {self.shares!r}: expected one of {get_args(Shares)}.")
        self._check_bound("min_shard_size", at_least=0)
        if self.max_accumulation_steps is not None:
            self._check_bound("max_accumulation_steps", at_least=1)
        even = BatchSplit.even(  # checks the global batch with the same words
            global_batch_size=self.global_batch_size, accumulation_steps=1, num_devices=self.num_devices
        )
        object.__setattr__(self, "global_batch_size", even.global_batch_size)
        if self.num_devices * self.min_shard_size > self.global_batch_size:
            raise InvalidSplitError(
                f"{self.num_devices} devices x min_shard_size {self.min_shard_size} = "
                f"{self.num_devices * self.min_shard_size} samples, more than the global batch of "
                f"{self.global_batch_size}. Lower min_shard_size or use fewer devices."
            )

    def _check_bound(self, name: str, *, at_least: int) -> None:
        bound = as_int(getattr(self, name))
        if bound is None or bound < at_least:
            raise InvalidSplitError(f"{name} is {getattr(self, name)!r}: expected an integer of at least {at_least}.")
        object.__setattr__(self, name, bound)

    def __iter__(self) -> Iterator[BatchSplit]:
        for accumulation_steps in self._accumulation_steps():
            largest = -(-self.global_batch_size // accumulation_steps)
            for shard_sizes in self._shards(largest):
                yield BatchSplit(
                    global_batch_size=self.global_batch_size,
                    accumulation_steps=accumulation_steps,
                    shard_sizes=shard_sizes,
                )

    def __len__(self) -> int:
        """`num_splits`; Python's ``len`` stops at 2**63, and raises OverflowError beyond."""
        return self.num_splits

    @property
    def num_splits(self) -> int:
        """How many splits the space holds, however many that is."""
        if self.shares == "gpu0":
            return sum(1 for _ in self)
        total = 0
        for accumulation_steps in self._accumulation_steps():
            spare = -(-self.global_batch_size // accumulation_steps) - self.num_devices * self.min_shard_size
            total += comb(spare + self.num_devices - 1, self.num_devices - 1) if spare >= 0 else 0
        return total

    def __contains__(self, split: object) -> bool:
        if not isinstance(split, BatchSplit) or split.num_devices != self.num_devices:
            return False
        if split.global_batch_size != self.global_batch_size or min(split.shard_sizes) < self.min_shard_size:
            return False
        if split.accumulation_steps not in self._accumulation_steps():
            return False
        largest = split.micro_batch_size
        return self.shares == "each" or split.shard_sizes == shards_with_gpu0(largest, self.num_devices, split.gpu0_bsz)

    def even_splits(self) -> Iterator[BatchSplit]:
        """The even split at each number of accumulation steps, fewest first, if in the space."""
        for accumulation_steps in self._accumulation_steps():
            split = BatchSplit.even(
                global_batch_size=self.global_batch_size,
                accumulation_steps=accumulation_steps,
                num_devices=self.num_devices,
            )
            if split in self:
                yield split

    def _accumulation_steps(self) -> range:
        most = self.global_batch_size
        if self.max_accumulation_steps is not None:
            most = min(most, self.max_accumulation_steps)
        return range(1, most + 1)

    def _shards(self, micro_batch_size: int) -> Iterator[tuple[int, ...]]:
        if self.shares == "each":
            yield from _compositions(micro_batch_size, self.num_devices, self.min_shard_size)
            return
        fewest_on_gpu0 = micro_batch_size if self.num_devices == 1 else self.min_shard_size
        for gpu0_bsz in range(fewest_on_gpu0, micro_batch_size + 1):
            shard_sizes = shards_with_gpu0(micro_batch_size, self.num_devices, gpu0_bsz)
            if min(shard_sizes) >= self.min_shard_size:
                yield shard_sizes


def _compositions(total: int, num_parts: int, smallest: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `total` as `num_parts` integers of at least `smallest`."""
    if num_parts == 1:
        if total >= smallest:
            yield (total,)
        return
    for first in range(smallest, total - smallest * (num_parts - 1) + 1):
        for rest in _compositions(total - first, num_parts - 1, smallest):
            yield (first, *rest)
