"""The splits worth judging where there are too many to list: balanced ones, as far as memory may allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from splittune.search.attempts import Attempt
from splittune.search.candidates.balance import TimeOfShares, balanced_table
from splittune.search.candidates.table import Floats, SplitTable, concatenate, micro_batches
from splittune.search.models.memory import MemoryModel
from splittune.split import BatchSplit, SplitSpace


def candidates(
    space: SplitSpace,
    steps: Floats | None,
    believed: Sequence[Sequence[TimeOfShares]],
    memory: MemoryModel,
    limits: Floats,
    ruling_out: Sequence[Attempt],
) -> SplitTable:
    """Splits whose cards finish together, for every number of cards and every micro-batch, or those of `steps`.

    Curves are each card's; there are splits for every one of the `believed` sets. Shares end where memory keeps within
    `limits`, bytes (n,): for sure, possibly, and as likely as lies between, each a split of its own; and all others' for sure
    beside GPU 0's, which holds what no other does, less likely than not. What a failure in `ruling_out` has ruled out is
    avoided.
    """
    chosen = [pair for pair in micro_batches(space) if steps is None or pair[0] in steps]
    if not chosen:  # more steps than any micro-batch needs
        return SplitTable(
            global_batch_size=space.global_batch_size, steps=np.zeros(0), shards=np.zeros((0, space.num_devices))
        )
    pairs = np.array(chosen, dtype=float)
    largest = _largest_shares(pairs, memory, limits, ruling_out)
    return concatenate(*(balanced_table(space, pairs, curves, largest) for curves in believed))


def _largest_shares(pairs: Floats, memory: MemoryModel, limits: Floats, ruling_out: Sequence[Attempt]) -> Floats:
    """(6, N, n) for N accumulation steps and micro-batches: for sure, with GPU 0 doubtful, and on to the largest that may fit."""
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
    largest = low.reshape(5, -1, len(limits))
    only_gpu0_doubtful = np.where(np.arange(len(limits)) == 0, largest[3], largest[0])
    return np.concatenate([largest[:1], only_gpu0_doubtful[None], largest[1:]])


def failures_on_alike(attempts: Sequence[Attempt], memory: MemoryModel, limits: Floats) -> list[Attempt]:
    """What must fail like `attempts`: a replica's share that lacked memory, on each of its kind whose limit it exceeds.

    Only GPU 0's memory depends on the whole micro-batch, so the smallest that has such a share fails, too; the rest of it is
    GPU 0's, of which nothing is said.
    """
    failures = []
    for attempt in attempts:
        split, readings = attempt.split, attempt.measurement.memory
        for device in sorted(attempt.lacking - {0}) if readings else ():
            share, batch = split.shard_sizes[device], split.global_batch_size
            # the most steps whose largest micro-batch has so many samples
            steps = (batch - 1) // (share - 1) if share > 1 else batch
            steps = 1 if split.accumulation_steps == 1 else steps
            rest = -(-batch // steps) - share
            for other in memory.alike(device):
                if readings[device].peak_reserved_bytes > limits[other]:
                    shards = [rest, *(share if i == other else 0 for i in range(1, split.num_devices))]
                    failed = BatchSplit(global_batch_size=batch, accumulation_steps=steps, shard_sizes=tuple(shards))
                    measurement = replace(attempt.measurement, split=failed)
                    failures.append(Attempt(measurement=measurement, lacking=frozenset({other})))
    return failures
