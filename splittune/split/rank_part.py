"""Which samples of a global batch are one rank's: pure integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from splittune.checks import checked_int
from splittune.errors import ConfigError
from splittune.split.batch_split import BatchSplit
from splittune.split.micro_batches import micro_batch_sizes_of
from splittune.split.shards import fit_shards

# Sizes of a global batch whose parts are kept. An epoch has two, the full one and the last; a
# sampler of batches by length has some dozens. Doubled, it changes nothing but memory.
NUM_KEPT = 256

# Samples of a rank in a short micro-batch, where that can be: BatchNorm has no variance of a single one.
NO_SINGLE_SAMPLE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank takes of one global batch."""

    positions: tuple[int, ...]
    """Of its samples in the global batch, micro-batch by micro-batch."""
    stand_in: int | None
    """Position of a sample to run where the rank has none, which counts nothing; None where it has
    one in every micro-batch."""
    sizes: tuple[int, ...]
    """Its samples in each micro-batch, 0 for none."""
    micro_batch_sizes: tuple[int, ...]
    """The samples of each micro-batch, of all ranks together."""

    @property
    def positions_to_load(self) -> tuple[int, ...]:
        """Its samples, and the stand-in at the end where there is one."""
        return self.positions if self.stand_in is None else (*self.positions, self.stand_in)


@lru_cache(maxsize=NUM_KEPT)
def rank_part(num_samples: int, split: BatchSplit, rank: int) -> RankPart:
    """What `rank` takes of a global batch of `num_samples`: its place in every micro-batch.

    The micro-batches are those of one process, and so are the shards: device i's of the one is rank
    i's of the other, in the same order. Where all tuned shares are of 2 samples or more, a short
    micro-batch leaves no rank a single one if others can take it: BatchNorm trains on no fewer. The
    stand-in is the rank's own first sample, or the first of the global batch where it has none at
    all.

    Worked: tuned for 8 samples in 2 micro-batches, shares 1 + 3, a batch of 5 runs as 3 and 2, of
    which `fit_shards` gives (1, 2) and (0, 2). Rank 0 takes position 0, and stands in with it in
    the second micro-batch; rank 1 takes 1, 2, 3 and 4.

    Raises:
        ConfigError: no sample or more than the split was tuned for, or a rank that it has no shard
            for.
    """
    if checked_int("rank", rank, at_least=0) >= split.num_devices:
        raise ConfigError(
            f"rank is {rank}: expected at most {split.num_devices - 1}, for {split} has {split.num_devices} shards."
        )
    micro_batch_sizes = micro_batch_sizes_of(num_samples, split)
    # where a tuned share is 1, its rank has single samples in every batch
    least = min(NO_SINGLE_SAMPLE, *(share for share in split.shard_sizes if share))
    positions: list[int] = []
    sizes: list[int] = []
    for start, size in zip(accumulate(micro_batch_sizes, initial=0), micro_batch_sizes, strict=False):
        shards = fit_shards(size, split.shard_sizes, least)
        first = start + sum(shards[:rank])
        positions += range(first, first + shards[rank])
        sizes.append(shards[rank])
    stand_in = None if all(sizes) else [*positions, 0][0]
    return RankPart(
        positions=tuple(positions), stand_in=stand_in, sizes=tuple(sizes), micro_batch_sizes=micro_batch_sizes
    )
