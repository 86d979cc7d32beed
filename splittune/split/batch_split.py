"""One way to run an optimizer step: accumulation steps and every device's shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from splittune.checks import as_int
from splittune.errors import InvalidSplitError
from splittune.split.shards import even_shards, shards_with_gpu0, spread_evenly

# Shares of more devices are counted where equal ones follow one another, not listed. A choice: few machines have more.
MAX_LISTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """`global_batch_size` samples in `accumulation_steps` micro-batches, each spread over devices.

    `shard_sizes[i]` is device i's part of the largest micro-batch, so the shards sum to
    ``ceil(global_batch_size / accumulation_steps)``. Example: 10 samples in 3 steps over two
    devices, ``BatchSplit(global_batch_size=10, accumulation_steps=3, shard_sizes=(1, 3))``, has
    ``micro_batch_sizes == (4, 3, 3)``; a micro-batch of 3 is sharded ``(1, 2)``.

    Raises:
        InvalidSplitError: a size is no integer or out of range, or the shards do not sum to the
            micro-batch.
    """

    global_batch_size: int
    accumulation_steps: int
    shard_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        # tuple() also takes what JSON gives back: a list
        shard_sizes = tuple(_checked_shard(device, shard) for device, shard in enumerate(self.shard_sizes))
        global_batch_size, accumulation_steps = _checked_sizes(self.global_batch_size, self.accumulation_steps)
        object.__setattr__(self, "global_batch_size", global_batch_size)
        object.__setattr__(self, "accumulation_steps", accumulation_steps)
        object.__setattr__(self, "shard_sizes", shard_sizes)
        expected = _largest_micro_batch(self.global_batch_size, self.accumulation_steps)
        if sum(self.shard_sizes) != expected:
            arithmetic = listed_shares(self.shard_sizes) or "nothing"
            raise InvalidSplitError(
                f"shard_sizes sum to {arithmetic} = {sum(self.shard_sizes)}, but the largest micro-batch has "
                f"ceil({self.global_batch_size} / {self.accumulation_steps}) = {expected} samples. "
                f"Change the shards so that they sum to {expected}."
            )

    @classmethod
    def even(cls, *, global_batch_size: int, accumulation_steps: int, num_devices: int) -> BatchSplit:
        """The even split; a remainder goes to the devices after GPU 0."""
        global_batch_size, accumulation_steps = _checked_sizes(global_batch_size, accumulation_steps)
        largest = _largest_micro_batch(global_batch_size, accumulation_steps)
        return cls(
            global_batch_size=global_batch_size,
            accumulation_steps=accumulation_steps,
            shard_sizes=even_shards(largest, num_devices),
        )

    @classmethod
    def with_gpu0(
        cls, *, global_batch_size: int, accumulation_steps: int, num_devices: int, gpu0_bsz: int
    ) -> BatchSplit:
        """GPU 0 takes `gpu0_bsz` of the largest micro-batch; the others share the rest evenly."""
        global_batch_size, accumulation_steps = _checked_sizes(global_batch_size, accumulation_steps)
        largest = _largest_micro_batch(global_batch_size, accumulation_steps)
        return cls(
            global_batch_size=global_batch_size,
            accumulation_steps=accumulation_steps,
            shard_sizes=shards_with_gpu0(largest, num_devices, gpu0_bsz),
        )

    @property
    def micro_batch_size(self) -> int:
        """Samples of the largest micro-batch."""
        return _largest_micro_batch(self.global_batch_size, self.accumulation_steps)

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Sizes of all micro-batches, larger first: they sum to the global batch."""
        return spread_evenly(self.global_batch_size, self.accumulation_steps)

    @property
    def gpu0_bsz(self) -> int:
        """GPU 0's share of the largest micro-batch."""
        return self.shard_sizes[0]

    @property
    def num_devices(self) -> int:
        return len(self.shard_sizes)

    def __str__(self) -> str:
        return f"{self.global_batch_size} = {self.accumulation_steps} x ({listed_shares(self.shard_sizes)})"


def listed_shares(shard_sizes: Sequence[int], *, plus: str = " + ", times: str = " x ") -> str:
    """``"1 + 5 + 5 + 5"``; of more than `MAX_LISTED` devices ``"512 x 4 + 512 x 12"``: 512 of 4 samples, 512 of 12."""
    if len(shard_sizes) <= MAX_LISTED:
        return plus.join(map(str, shard_sizes))
    runs = [(size, sum(1 for _ in alike)) for size, alike in groupby(shard_sizes)]
    return plus.join(f"{count}{times}{size}" if count > 1 else str(size) for size, count in runs)


def _largest_micro_batch(global_batch_size: int, accumulation_steps: int) -> int:
    return -(-global_batch_size // accumulation_steps)


def _checked_shard(device: int, shard: object) -> int:
    size = as_int(shard)
    if size is None or size < 0:
        raise InvalidSplitError(f"shard_sizes[{device}] is {shard!r}: expected an integer of at least 0.")
    return size


def _checked_sizes(global_batch_size: object, accumulation_steps: object) -> tuple[int, int]:
    """Both as plain ints, in each other's range."""
    batch, steps = as_int(global_batch_size), as_int(accumulation_steps)
    if batch is None or batch < 1:
        raise InvalidSplitError(
            f"global_batch_size is {global_batch_size!r}: expected an integer of at least 1, "
            "the samples behind one optimizer step."
        )
    if steps is None or not 1 <= steps <= batch:
        raise InvalidSplitError(
            f"accumulation_steps is {accumulation_steps!r}: expected an integer from 1 to "
            f"global_batch_size={batch}, so that no micro-batch is empty."
        )
    return batch, steps
