"""The splits a search may choose from, as a fixed, ordered list with an index for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import comb
from typing import overload

from splittune.split import BatchSplit, SplitSpace, even_shards, shards_with_gpu0

MAX_CANDIDATES = 200_000
"""Above this many splits the list holds a grid of them; see `Candidates`."""


class Candidates(Sequence[BatchSplit]):
    """The splits of `space` in its own order: fewest accumulation steps first, then by shard sizes.

    A space of more than `limit` splits is thinned, by arithmetic alone, so that the same space always gives the same
    list. Two rules do it, and `is_thinned` says so:

    - of several accumulation steps with the same largest micro-batch only the fewest are kept, since more of them run
      more micro-steps of the same size;
    - shares move in grains. In a micro-batch of m samples a grain is m // R, and R the largest power of two, 1024 at
      most, with which the list holds at most `limit`. Under ``shares="gpu0"`` GPU 0 gets ``min_shard_size`` plus whole
      grains. Under ``shares="each"`` every device after GPU 0 does, GPU 0 gets the rest, and the list holds besides
      what it would under ``shares="gpu0"``.

    The even splits are always in it. Example: 64 samples over 8 devices with ``shares="each"`` have 1.3 billion
    splits; their grains are an eighth of the micro-batch.
    """

    def __init__(self, space: SplitSpace, *, limit: int = MAX_CANDIDATES) -> None:
        self.space = space
        self.is_thinned = sum(_count(space, size, 1) for _, size in _largest_micro_batches(space)) > limit
        self._resolution = _finest_resolution(space, limit) if self.is_thinned else None
        splits = _thinned(space, limit) if self.is_thinned else list(space)
        self._splits = tuple(splits)
        self._index = {(split.accumulation_steps, split.shard_sizes): i for i, split in enumerate(splits)}
        ends: dict[int, int] = {split.accumulation_steps: i + 1 for i, split in enumerate(splits)}
        starts = (0, *ends.values())
        self._ranges = {steps: range(start, end) for start, (steps, end) in zip(starts, ends.items(), strict=False)}
        self.even_splits: tuple[BatchSplit, ...] = tuple(split for split in space.even_splits() if split in self)
        """The even splits, fewest accumulation steps first."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of accumulation steps that some candidate has, fewest first."""
        return tuple(self._ranges)

    def at(self, accumulation_steps: int) -> range:
        """The indices of the candidates with this many accumulation steps; none, and it is empty."""
        return self._ranges.get(accumulation_steps, range(0))

    def find(self, accumulation_steps: int, shard_sizes: Sequence[int]) -> int | None:
        """The index of this very split; None where it is no candidate."""
        return self._index.get((accumulation_steps, tuple(shard_sizes)))

    def near(self, accumulation_steps: int, shard_sizes: Sequence[int]) -> int | None:
        """The index of this split or, in a thinned list, of the one with its shares rounded to grains; else None."""
        exact = self.find(accumulation_steps, shard_sizes)
        if exact is not None or self._resolution is None:
            return exact
        micro_batch_size, smallest = sum(shard_sizes), self.space.min_shard_size
        grain = max(1, micro_batch_size // self._resolution)
        if self.space.shares == "gpu0":
            gpu0_bsz = smallest + round((shard_sizes[0] - smallest) / grain) * grain
            if gpu0_bsz > micro_batch_size:
                return None
            return self.find(accumulation_steps, shards_with_gpu0(micro_batch_size, len(shard_sizes), gpu0_bsz))
        others = [smallest + round((shard - smallest) / grain) * grain for shard in shard_sizes[1:]]
        return self.find(accumulation_steps, (micro_batch_size - sum(others), *others))

    def index(self, split: BatchSplit, start: int = 0, stop: int | None = None) -> int:
        """The index of this split, at once; a ``ValueError`` where it is no candidate."""
        index = self.find(split.accumulation_steps, split.shard_sizes)
        if index is None or not start <= index < (len(self) if stop is None else stop):
            raise ValueError(f"{split} is no candidate.")
        return index

    def nearest(self, shard_sizes: Sequence[int], indices: Iterable[int]) -> int | None:
        """Of these indices the one whose shards differ least from `shard_sizes`, the first of equals."""

        def distance(index: int) -> tuple[int, int]:
            pairs = zip(self._splits[index].shard_sizes, shard_sizes, strict=True)
            return sum(abs(own - wanted) for own, wanted in pairs), index

        return min(indices, key=distance, default=None)

    def __len__(self) -> int:
        return len(self._splits)

    def __iter__(self) -> Iterator[BatchSplit]:
        return iter(self._splits)

    def __contains__(self, split: object) -> bool:
        return isinstance(split, BatchSplit) and (split.accumulation_steps, split.shard_sizes) in self._index

    @overload
    def __getitem__(self, index: int) -> BatchSplit: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[BatchSplit, ...]: ...
    def __getitem__(self, index: int | slice) -> BatchSplit | tuple[BatchSplit, ...]:
        return self._splits[index]


def _largest_micro_batches(space: SplitSpace) -> Iterator[tuple[int, int]]:
    """(accumulation steps, samples of the largest micro-batch), fewest steps first, where every device gets enough."""
    most = min(space.global_batch_size, space.max_accumulation_steps or space.global_batch_size)
    for steps in range(1, most + 1):
        micro_batch_size = -(-space.global_batch_size // steps)
        if micro_batch_size < space.num_devices * space.min_shard_size:
            return
        yield steps, micro_batch_size


def _kept_micro_batches(space: SplitSpace) -> dict[int, int]:
    """From the size of a largest micro-batch to the fewest accumulation steps that have it."""
    return {micro_batch_size: steps for steps, micro_batch_size in reversed(list(_largest_micro_batches(space)))}


def _finest_resolution(space: SplitSpace, limit: int) -> int:
    """The largest R with which `space` has at most `limit` splits, see `Candidates`."""
    kept = _kept_micro_batches(space)
    powers = (2**exponent for exponent in range(10, 0, -1))
    return next((r for r in powers if sum(_count(space, m, max(1, m // r)) for m in kept) <= limit), 1)


def _count(space: SplitSpace, micro_batch_size: int, grain: int) -> int:
    """How many splits of one micro-batch there are in grains, or a few more: counted without listing them."""
    if space.num_devices == 1:
        return 1
    if space.shares == "gpu0":
        return micro_batch_size // grain + 2
    grains = (micro_batch_size - space.num_devices * space.min_shard_size) // grain
    return comb(grains + space.num_devices - 1, space.num_devices - 1)


def _thinned(space: SplitSpace, limit: int) -> list[BatchSplit]:
    resolution = _finest_resolution(space, limit)
    gpu0_only = replace(space, shares="gpu0")
    gpu0_resolution = _finest_resolution(gpu0_only, limit)
    splits = []
    for micro_batch_size, steps in sorted(_kept_micro_batches(space).items(), reverse=True):
        shards = set(_gpu0_grid(gpu0_only, micro_batch_size, max(1, micro_batch_size // gpu0_resolution)))
        if space.shares == "each":
            shards |= set(_each_grid(space, micro_batch_size, max(1, micro_batch_size // resolution)))
        for shard_sizes in sorted(shards):
            split = BatchSplit(
                global_batch_size=space.global_batch_size, accumulation_steps=steps, shard_sizes=shard_sizes
            )
            if split in space:
                splits.append(split)
    return splits


def _gpu0_grid(space: SplitSpace, micro_batch_size: int, grain: int) -> Iterator[tuple[int, ...]]:
    yield even_shards(micro_batch_size, space.num_devices)
    if space.num_devices > 1:
        for gpu0_bsz in range(space.min_shard_size, micro_batch_size + 1, grain):
            yield shards_with_gpu0(micro_batch_size, space.num_devices, gpu0_bsz)


def _each_grid(space: SplitSpace, micro_batch_size: int, grain: int) -> Iterator[tuple[int, ...]]:
    smallest, num_devices = space.min_shard_size, space.num_devices
    for counts in _at_most((micro_batch_size - num_devices * smallest) // grain, num_devices - 1):
        others = tuple(smallest + count * grain for count in counts)
        yield (micro_batch_size - sum(others), *others)


def _at_most(total: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to take `num_parts` numbers of at least 0 that sum to at most `total`."""
    if num_parts == 0:
        yield ()
        return
    for first in range(total + 1):
        for rest in _at_most(total - first, num_parts - 1):
            yield (first, *rest)
