"""One way to run an optimizer step: accumulation steps and every device's shard."""

from __future__ import annotations

from dataclasses import dataclass

from splittune.errors import InvalidSplitError
from splittune.split.shards import even_shards, fit_shards, shards_with_gpu0, spread_evenly


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
        object.__setattr__(self, "shard_sizes", tuple(self.shard_sizes))
        _check_sizes(self.global_batch_size, self.accumulation_steps)
        for device, shard in enumerate(self.shard_sizes):
            if not _is_int(shard) or shard < 0:
                raise InvalidSplitError(f"shard_sizes[{device}] is {shard!r}: expected an integer of at least 0.")
        expected = _largest_micro_batch(self.global_batch_size, self.accumulation_steps)
        if sum(self.shard_sizes) != expected:
            arithmetic = " + ".join(map(str, self.shard_sizes)) or "nothing"
            raise InvalidSplitError(
                f"shard_sizes sum to {arithmetic} = {sum(self.shard_sizes)}, but the largest micro-batch has "
                f"ceil({self.global_batch_size} / {self.accumulation_steps}) = {expected} samples. "
                f"Change the shards so that they sum to {expected}."
            )

    @classmethod
    def even(cls, *, global_batch_size: int, accumulation_steps: int, num_devices: int) -> BatchSplit:
        """The even split; a remainder goes to the devices after GPU 0."""
        _check_sizes(global_batch_size, accumulation_steps)
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
        _check_sizes(global_batch_size, accumulation_steps)
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

    def shards_of(self, micro_batch_size: int) -> tuple[int, ...]:
        """How a micro-batch of this size, at most the largest, is spread; see `fit_shards`."""
        return fit_shards(micro_batch_size, self.shard_sizes)

    def __str__(self) -> str:
        shards = " + ".join(map(str, self.shard_sizes))
        return f"{self.global_batch_size} = {self.accumulation_steps} x ({shards})"


def _largest_micro_batch(global_batch_size: int, accumulation_steps: int) -> int:
    return -(-global_batch_size // accumulation_steps)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(global_batch_size: int, accumulation_steps: int) -> None:
    if not _is_int(global_batch_size) or global_batch_size < 1:
        raise InvalidSplitError(
            f"global_batch_size is {global_batch_size!r}: expected an integer of at least 1, "
            "the samples behind one optimizer step."
        )
    if not _is_int(accumulation_steps) or not 1 <= accumulation_steps <= global_batch_size:
        raise InvalidSplitError(
            f"accumulation_steps is {accumulation_steps!r}: expected an integer from 1 to "
            f"global_batch_size={global_batch_size}, so that no micro-batch is empty."
        )
