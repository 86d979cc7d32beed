"""The splits worth judging where there are too many to list: balanced ones, as far as memory may allow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splittune.search.attempt import Attempt
from splittune.search.balance import TimeOfShares, balanced_table
from splittune.search.memory_model import MemoryModel
from splittune.search.table import Floats, SplitTable, concatenate, even_table, micro_batches
from splittune.split import SplitSpace


def candidates(
    space: SplitSpace,
    believed: Sequence[Sequence[TimeOfShares]],
    memory: MemoryModel,
    limits: Floats,
    ruling_out: Sequence[Attempt],
) -> SplitTable:
    """The even splits, and those whose cards finish together, for every micro-batch and number of cards.

    Curves are each card's; there are splits for every one of the `believed` sets. Shares end where memory keeps within `limits`, bytes (n,): for sure, possibly, and as likely as lies between, each a
    split of its own. What a failure in `ruling_out` has ruled out is avoided.
    """
    pairs = np.array(list(micro_batches(space)), dtype=float)
    largest = _largest_shares(pairs, memory, limits, ruling_out)
    return concatenate(even_table(space), *(balanced_table(space, curves, largest) for curves in believed))


def _largest_shares(pairs: Floats, memory: MemoryModel, limits: Floats, ruling_out: Sequence[Attempt]) -> Floats:
    """(5, N, n) for N accumulation steps and micro-batches: from the share that fits for sure to the largest that may."""
    way = np.repeat(np.arange(5), len(pairs))[:, None]
    steps, sizes = np.tile(pairs, (5, 1)).T
    low, high = np.zeros((len(sizes), len(limits))), np.repeat(sizes[:, None], len(limits), axis=1)
    for attempt in ruling_out:  # as `Attempt.rules_out` has it
        failed = attempt.split
        is_harder = (sizes >= failed.micro_batch_size) & ((steps > 1) | (failed.accumulation_steps == 1))
        for device in attempt.lacking:
            high[is_harder, device] = np.minimum(high[is_harder, device], max(0, failed.shard_sizes[device] - 1))
    for _ in range(int(sizes.max()).bit_length() + 1):
        middle = np.ceil((low + high) / 2)
        needed = memory.needed(steps, middle, sizes)
        most, likely, least = needed.most, needed.likely, needed.least
        fits = np.choose(way, [most, (most + likely) / 2, likely, (likely + least) / 2, least]) <= limits
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return low.reshape(5, -1, len(limits))
