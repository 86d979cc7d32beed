"""Candidates where the splits are too many to list: balanced shards, as far as memory may allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splittune.search.arrays import FloatArray
from splittune.search.candidates.balance import balanced_table
from splittune.search.candidates.table import SplitTable, concatenate, micro_batches
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.hypotheses import Hypothesis
from splittune.search.models.memory import MemoryModel
from splittune.split import BatchSplit, SplitSpace

# What is to fit: so much of the way from the least that a device may need to the most. A choice: with the ends and the
# middle alone the best was no candidate where one device may hold a little more than it surely can, and not half as
# much as it might. More: each proposal takes longer.
PARTS = (1.0, 0.75, 0.5, 0.25, 0.0)


def candidates(
    space: SplitSpace,
    hypotheses: Sequence[Hypothesis],
    memory: MemoryModel,
    limits: FloatArray,
    failures: Sequence[JudgedTrial],
) -> SplitTable:
    """Splits whose devices finish together: for each micro-batch and number of devices taking part.

    There are splits for each answer of `_largest_shards`.

    Args:
        space: the legal splits.
        hypotheses: how long each device works. There are splits for each of them.
        memory: predicts the bytes of a shard.
        limits: (n,) bytes that each device may hold.
        failures: trials that lacked memory. What they rule out is avoided.
    """
    pairs = np.array(list(micro_batches(space)), dtype=float)
    largest = _largest_shards(pairs, memory, limits, failures)
    balanced = (balanced_table(space, pairs, told.curves, largest, told.gpu0_per_sample_s) for told in hypotheses)
    return concatenate(*balanced)


def neighbours(split: BatchSplit, min_shard_size: int) -> SplitTable:
    """The splits that move one sample, or a quarter of a share, from one device to another, or exchange two shares.

    Example: (8, 4) has the neighbours (7, 5), (6, 6), (4, 8), (9, 3).
    """
    rows = set()
    for giver, share in enumerate(split.shard_sizes):
        for taker, other in enumerate(split.shard_sizes):
            for moved in {1, share // 4, share - other}:
                shards = list(split.shard_sizes)
                shards[giver] -= moved
                shards[taker] += moved
                if giver != taker and moved > 0 and shards[giver] >= min_shard_size:
                    rows.add(tuple(shards))
    return SplitTable(
        global_batch_size=split.global_batch_size,
        steps=np.full(len(rows), float(split.accumulation_steps)),
        shards=np.array(sorted(rows), dtype=float).reshape(-1, split.num_devices),
    )


def _largest_shards(
    pairs: FloatArray, memory: MemoryModel, limits: FloatArray, failures: Sequence[JudgedTrial]
) -> FloatArray:
    """(8, N, n) the largest shards that fit, for N pairs of accumulation steps and micro-batch.

    From sure to possible: what fits is the most that memory may need, or 3/4, 1/2, 1/4 or none of the way there from
    the least. The middle three are there twice, first for GPU 0 alone, which holds what no other device does: the
    others have what surely fits then.
    """
    num_pairs, num_devices = len(pairs), len(limits)
    steps, sizes = np.tile(pairs, (len(PARTS), 1)).T  # one part below the other
    parts = np.repeat(PARTS, num_pairs)[:, None]
    low = np.zeros((len(sizes), num_devices))
    high = np.repeat(sizes[:, None], num_devices, axis=1)
    for failure in failures:
        high = np.minimum(high, np.maximum(failure.largest_open_shards(steps, sizes), 0))
    for _ in range(int(sizes.max()).bit_length() + 1):
        middle = np.ceil((low + high) / 2)
        needed = memory.needed(steps, middle, sizes)
        fits = needed.least + parts * (needed.most - needed.least) <= limits
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    sure, *unsure, possible = low.reshape(len(PARTS), num_pairs, num_devices)
    only_gpu0_unsure = [np.where(np.arange(num_devices) == 0, one, sure) for one in unsure]
    return np.stack([sure, *only_gpu0_unsure, *unsure, possible])
