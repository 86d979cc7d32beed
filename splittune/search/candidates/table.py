"""Splits as arrays, so that the models judge thousands at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from splittune.search.arrays import BoolArray, FloatArray
from splittune.split import BatchSplit, SplitSpace, even_shards

if TYPE_CHECKING:
    from splittune.search.judged_trials import JudgedTrial


# A choice: GPU 0's share of one micro-batch takes at most this many values, so above 1,024 samples
# it moves by more than one at a time. More values cost time to judge and gain at most a thousandth.
MAX_SHARES_PER_MICRO_BATCH = 1024
# A choice: spaces of every device's own share are listed whole up to this many splits. Larger lists
# are exact and slow; beyond it candidates are balanced, see `balance`.
MAX_LISTED = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTable:
    """N splits of one space: accumulation steps (N,) and shards (N, n), whole numbers as floats."""

    global_batch_size: int
    steps: FloatArray
    shards: FloatArray

    @classmethod
    def of(cls, splits: Sequence[BatchSplit]) -> SplitTable:
        """These splits of one space, at least one, in their order."""
        return cls(
            global_batch_size=splits[0].global_batch_size,
            steps=np.array([split.accumulation_steps for split in splits], dtype=float),
            shards=np.array([split.shard_sizes for split in splits], dtype=float),
        )

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def micro_batch_sizes(self) -> FloatArray:
        """(N,) samples in the largest micro-batch."""
        return np.asarray(self.shards.sum(axis=1))

    def split(self, row: int) -> BatchSplit:
        """The split in one row."""
        return BatchSplit(
            global_batch_size=self.global_batch_size,
            accumulation_steps=int(self.steps[row]),
            shard_sizes=tuple(int(shard) for shard in self.shards[row]),
        )

    def splits(self) -> list[BatchSplit]:
        """All rows as splits."""
        return [self.split(row) for row in range(len(self))]

    def where(self, keep: BoolArray) -> SplitTable:
        """The rows that `keep` marks."""
        return SplitTable(global_batch_size=self.global_batch_size, steps=self.steps[keep], shards=self.shards[keep])

    def is_any_of(self, splits: list[BatchSplit]) -> BoolArray:
        """(N,) which rows are among `splits`."""
        found = np.zeros(len(self), dtype=bool)
        for split in splits:
            same = self.steps == split.accumulation_steps
            same[same] = (self.shards[same] == np.array(split.shard_sizes)).all(axis=1)
            found |= same
        return found


def micro_batches(space: SplitSpace) -> Iterator[tuple[int, int]]:
    """(k, m): each size m of the largest micro-batch, with the fewest accumulation steps k for it.

    More steps with the same largest micro-batch only run more micro-steps, so no best split has
    them. Example: 16 samples give (1, 16), (2, 8), (3, 6), (4, 4), (6, 3), (8, 2) and (16, 1).
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
    """The even splits: one for each size of the micro-batch, fewest accumulation steps first."""
    rows = [(k, even_shards(m, space.num_devices)) for k, m in micro_batches(space)]
    rows = [(k, shards) for k, shards in rows if min(shards) >= space.min_shard_size]
    return _table(space, [k for k, _ in rows], [np.array([shards], dtype=float) for _, shards in rows], [1] * len(rows))


def gpu0_table(space: SplitSpace) -> SplitTable:
    """All splits that vary GPU 0's share and spread the rest evenly.

    There is one for each share and size of the micro-batch, fewest accumulation steps first. Above
    `MAX_SHARES_PER_MICRO_BATCH` samples GPU 0's share moves in equal jumps. Example: of 100,000
    samples by 98. The even split, no sample and all samples are among them in any case.
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
    """Splits that give the whole micro-batch to one device; none where the space has none."""
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
    """Whether `listed_table` holds every split that can be the best.

    It does where GPU 0's share alone is varied, and up to `MAX_LISTED` splits.
    """
    if space.shares == "gpu0" or space.num_devices == 1:
        return True
    spare = [size - space.num_devices * space.min_shard_size for _, size in micro_batches(space)]
    others = space.num_devices - 1
    return sum(comb(own + others, others) for own in spare if own >= 0) <= MAX_LISTED


def listed_table(space: SplitSpace) -> SplitTable:
    """Every split that can be the best; where they are too many, those that vary GPU 0's share.

    Example: 64 samples over 8 devices of any shares have 1.3 billion splits.
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


def open_rows(table: SplitTable, trials: Sequence[JudgedTrial]) -> BoolArray:
    """(N,) the rows that are neither measured nor ruled out by a failure."""
    closed = table.is_any_of([trial.split for trial in trials])
    for trial in trials:
        closed |= trial.rules_out_each(table.steps, table.shards)
    return ~closed


def concatenate(*tables: SplitTable) -> SplitTable:
    """The rows of all tables, each split once, fewest accumulation steps first."""
    rows = np.concatenate([np.column_stack([table.steps, table.shards]) for table in tables])
    rows = np.unique(rows, axis=0)
    return SplitTable(global_batch_size=tables[0].global_batch_size, steps=rows[:, 0], shards=rows[:, 1:])


def _shards_with_gpu0(m: int, n: int) -> FloatArray:
    """(N, n) the shards of m samples for every share of GPU 0, smallest first."""
    if n == 1:
        return np.array([[float(m)]])
    jump = -(-m // MAX_SHARES_PER_MICRO_BATCH)
    gpu0 = np.unique(np.concatenate([np.arange(0, m + 1, jump), [m, even_shards(m, n)[0]]]))
    share, more = np.divmod(m - gpu0, n - 1)
    others = share[:, None] + (np.arange(n - 1)[None, :] < more[:, None])
    return np.column_stack([gpu0, others]).astype(float)


def _table(space: SplitSpace, steps: list[int], blocks: list[FloatArray], counts: list[int]) -> SplitTable:
    return SplitTable(
        global_batch_size=space.global_batch_size,
        steps=np.repeat(np.array(steps, dtype=float), counts),
        shards=np.concatenate(blocks).astype(float) if blocks else np.zeros((0, space.num_devices)),
    )
