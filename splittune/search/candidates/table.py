"""Splits as arrays, for models that judge thousands at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splittune.split import BatchSplit, SplitSpace, even_shards

if TYPE_CHECKING:
    from splittune.search.attempts import Attempt

Floats = NDArray[np.float64]

# GPU 0's share moves in grains of a thousandth of the micro-batch where that is more than a sample.
MAX_SHARES_PER_MICRO_BATCH = 1024
MAX_LISTED = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTable:
    """N splits of one space: accumulation steps (N,) and shards (N, n)."""

    global_batch_size: int
    steps: Floats
    shards: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def micro_batch_sizes(self) -> Floats:
        """(N,) samples in the largest micro-batch."""
        return np.asarray(self.shards.sum(axis=1))

    def split(self, row: int) -> BatchSplit:
        """The split in one row."""
        return BatchSplit(
            global_batch_size=self.global_batch_size,
            accumulation_steps=int(self.steps[row]),
            shard_sizes=tuple(int(shard) for shard in self.shards[row]),
        )

    def where(self, keep: NDArray[np.bool_]) -> SplitTable:
        """The rows that `keep` marks."""
        return SplitTable(global_batch_size=self.global_batch_size, steps=self.steps[keep], shards=self.shards[keep])

    def is_any_of(self, splits: list[BatchSplit]) -> NDArray[np.bool_]:
        """(N,) which rows are among `splits`."""
        found = np.zeros(len(self), dtype=bool)
        for split in splits:
            same = self.steps == split.accumulation_steps
            same[same] = (self.shards[same] == np.array(split.shard_sizes)).all(axis=1)
            found |= same
        return found


def micro_batches(space: SplitSpace) -> Iterator[tuple[int, int]]:
    """Each size m of the largest micro-batch, with the fewest accumulation steps k that have it, as (k, m).

    More steps with the same largest micro-batch only run more micro-steps, so no best split has them. Example: 16
    samples give (1, 16), (2, 8), (3, 6), (4, 4), (6, 3), (8, 2) and (16, 1).
    """
    most = space.max_accumulation_steps or space.global_batch_size
    steps, last = 1, 0
    while steps <= min(most, space.global_batch_size):
        size = -(-space.global_batch_size // steps)
        if size != last:
            yield steps, size
            last = size
        if size == 1:
            return
        steps = max(steps + 1, -(-space.global_batch_size // (size - 1)))


def even_table(space: SplitSpace) -> SplitTable:
    """The even splits of `space`, fewest accumulation steps first, one for each size of the micro-batch."""
    rows = [(k, even_shards(m, space.num_devices)) for k, m in micro_batches(space)]
    rows = [(k, shards) for k, shards in rows if min(shards) >= space.min_shard_size]
    return _table(space, [k for k, _ in rows], [np.array([shards], dtype=float) for _, shards in rows], [1] * len(rows))


def gpu0_table(space: SplitSpace) -> SplitTable:
    """All splits that vary GPU 0's share and spread the rest evenly, one for each share and size of the micro-batch.

    Shares are in grains above `MAX_SHARES_PER_MICRO_BATCH` samples; even splits are there in any case.
    """
    steps, blocks, counts = [], [], []
    for k, m in micro_batches(space):
        shards = _shards_with_gpu0(m, space.num_devices)
        shards = shards[shards.min(axis=1) >= space.min_shard_size]
        if len(shards):
            steps.append(k)
            blocks.append(shards)
            counts.append(len(shards))
    return _table(space, steps, blocks, counts)


def singles_table(space: SplitSpace) -> SplitTable:
    """The splits of which one card alone does all, where the space has them."""
    if space.shares == "gpu0" or space.min_shard_size or space.num_devices == 1:
        return _table(space, [], [], [])
    sizes = list(micro_batches(space))
    return _table(
        space,
        [k for k, _ in sizes],
        [m * np.eye(space.num_devices) for _, m in sizes],
        [space.num_devices] * len(sizes),
    )


def can_be_listed(space: SplitSpace) -> bool:
    """Whether `listed_table` holds every split that can be the best."""
    if space.shares == "gpu0" or space.num_devices == 1:
        return True
    spare = [size - space.num_devices * space.min_shard_size for _, size in micro_batches(space)]
    others = space.num_devices - 1
    return sum(comb(own + others, others) for own in spare if own >= 0) <= MAX_LISTED


def listed_table(space: SplitSpace) -> SplitTable:
    """Every split of `space` that can be the best, where they can be listed; else those that vary GPU 0's share.

    Lists of shares for every card end at `MAX_LISTED`: 64 samples over 8 cards have 1.3 billion.
    """
    if space.shares == "gpu0" or not can_be_listed(space):
        return gpu0_table(replace(space, shares="gpu0"))
    fewest = {steps for steps, _ in micro_batches(space)}
    splits = [split for split in space if split.accumulation_steps in fewest]
    return SplitTable(
        global_batch_size=space.global_batch_size,
        steps=np.array([split.accumulation_steps for split in splits], dtype=float),
        shards=np.array([split.shard_sizes for split in splits], dtype=float).reshape(-1, space.num_devices),
    )


def open_rows(table: SplitTable, attempts: Sequence[Attempt]) -> NDArray[np.bool_]:
    """(N,) the rows that are neither measured nor ruled out by a failure; `Attempt.rules_out` for all at once."""
    closed = table.is_any_of([attempt.split for attempt in attempts])
    for attempt in attempts:
        failed = attempt.split
        if not attempt.lacks_memory:
            continue
        harder = table.micro_batch_sizes >= failed.micro_batch_size
        if failed.accumulation_steps > 1:
            harder &= table.steps > 1
        larger = table.shards >= np.array(failed.shard_sizes)
        lacking = sorted(attempt.lacking)
        closed |= harder & (larger[:, lacking].any(axis=1) if lacking else larger.all(axis=1))
    return ~closed


def concatenate(*tables: SplitTable) -> SplitTable:
    """The rows of all tables, each split once, fewest accumulation steps first."""
    rows = np.concatenate([np.column_stack([table.steps, table.shards]) for table in tables])
    rows = np.unique(rows, axis=0)
    return SplitTable(global_batch_size=tables[0].global_batch_size, steps=rows[:, 0], shards=rows[:, 1:])


def _shards_with_gpu0(m: int, n: int) -> Floats:
    if n == 1:
        return np.array([[float(m)]])
    grain = -(-m // MAX_SHARES_PER_MICRO_BATCH)
    gpu0 = np.unique(np.concatenate([np.arange(0, m + 1, grain), [m, even_shards(m, n)[0]]]))
    share, more = np.divmod(m - gpu0, n - 1)
    others = share[:, None] + (np.arange(n - 1)[None, :] < more[:, None])
    return np.column_stack([gpu0, others]).astype(float)


def _table(space: SplitSpace, steps: list[int], blocks: list[Floats], counts: list[int]) -> SplitTable:
    return SplitTable(
        global_batch_size=space.global_batch_size,
        steps=np.repeat(np.array(steps, dtype=float), counts),
        shards=np.concatenate(blocks).astype(float) if blocks else np.zeros((0, space.num_devices)),
    )
