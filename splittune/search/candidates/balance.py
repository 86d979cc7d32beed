"""Shards that finish together: each device's own, from its time curve and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from splittune.search.arrays import BoolArray, FloatArray, IntArray
from splittune.search.candidates.table import SplitTable
from splittune.split import SplitSpace

# Seconds for each of many shards.
TimeOfShares = Callable[[FloatArray], FloatArray]

# The time within which all devices finish is found by bisection. 20 halvings leave a millionth of
# the longest time, which is less than two neighbouring shards differ by.
NUM_HALVINGS = 20


def balanced_table(
    space: SplitSpace,
    pairs: FloatArray,
    curves: Sequence[TimeOfShares],
    most_shards: FloatArray,
    gpu0_per_sample_s: float = 0.0,
) -> SplitTable:
    """The shards whose slowest device is fastest: for each micro-batch and number of devices.

    The search is for the least time T within which the devices can take the micro-batch. In T each
    device takes the largest shard that its curve allows, and no more than its memory holds; those
    that take most take part. T is found by bisection. With straight lines this is the closed form
    ``T = (m + sum a_i / b_i) / sum 1 / b_i``. Each split is there twice: with GPU 0 and without.

    Args:
        space: of every device's own share. A device that takes part has at least `min_shard_size`;
            all devices do where that is not 0.
        pairs: (N, 2) accumulation steps and the largest micro-batch, of `micro_batches`.
        curves: each device's seconds for a shard.
        most_shards: (C, N, n) the largest shards that fit, by C answers, the surest first. There is
            a split for each answer.
        gpu0_per_sample_s: what GPU 0 works beside its shard, for each sample of the micro-batch.
    """
    sizes = pairs[:, 1]
    shards = np.arange(int(sizes.max()) + 1, dtype=float)
    times = np.stack([curve(shards) for curve in curves])
    rows, counts = _tasks(space, pairs, most_shards)
    besides = np.zeros((len(rows), space.num_devices))
    besides[:, 0] = gpu0_per_sample_s * rows[:, 1]
    balanced = _balanced(times, besides, rows, counts, space.min_shard_size)
    keep = (balanced >= space.min_shard_size).all(axis=1) & (balanced.sum(axis=1) == rows[:, 1])
    return SplitTable(global_batch_size=space.global_batch_size, steps=rows[keep, 0], shards=balanced[keep])


def _tasks(space: SplitSpace, pairs: FloatArray, most_shards: FloatArray) -> tuple[FloatArray, IntArray]:
    """What is to be balanced: rows as `_balanced` takes them, and how many devices take part."""
    sizes, n = pairs[:, 1], space.num_devices
    caps = np.minimum(most_shards, sizes[None, :, None])
    caps = np.where(caps < space.min_shard_size, 0, np.floor(caps))
    is_new = np.ones(caps.shape[:2], dtype=bool)
    is_new[1:] = (caps[1:] != caps[:-1]).any(axis=2)
    # Of devices that could take as much, the one with the largest sure cap is asked first, GPU 0
    # last.
    sure = np.where(np.arange(n) == 0, np.inf, most_shards[0])
    ranks = np.argsort(np.argsort(-sure, axis=1, kind="stable"), axis=1)
    repeated = [np.broadcast_to(one, (len(caps), *one.shape))[is_new] for one in (pairs, ranks)]
    rows = np.column_stack([repeated[0], caps[is_new], repeated[1]])
    if not space.min_shard_size:  # a second copy of each row leaves GPU 0 out
        rows = np.concatenate([rows, np.where(np.arange(2 * n + 2) == 2, 0.0, rows)])
    counts = np.arange(n if space.min_shard_size else 1, n + 1)
    most = np.cumsum(-np.sort(-rows[:, 2 : n + 2], axis=1), axis=1)[:, counts - 1]
    which, count = np.nonzero(most >= rows[:, 1:2])
    return rows[which], counts[count]


def _balanced(times: FloatArray, besides: FloatArray, rows: FloatArray, counts: IntArray, smallest: int) -> FloatArray:
    """(N, n) shards of at most `counts` devices that sum to the micro-batch, the slowest fastest.

    `times` is (n, S): each device's seconds for shards of 0 to S - 1 samples; `besides`, (N, n), are
    those that it works besides. A row holds the steps, the micro-batch, n caps, and n ranks: the
    order of the devices among those that could take as much.
    """
    sizes, caps, ranks = rows[:, 1], *np.split(rows[:, 2:], 2, axis=1)
    # A shard that takes longer than a larger one, as just before a faster kernel starts, is none to
    # stop at.
    bounds = np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]
    row, column = np.arange(len(sizes)), counts - 1

    def taken(within: FloatArray, caps: FloatArray) -> FloatArray:
        """(N, n) what each device takes in that time."""
        left = (within[:, None] - besides).T
        fitting = [np.searchsorted(own, own_s, side="right") - 1 for own, own_s in zip(bounds, left, strict=True)]
        return np.asarray(np.minimum(np.maximum(np.stack(fitting, axis=1).astype(float), smallest), caps))

    def takes_part(shards: FloatArray) -> BoolArray:
        """(N, n) the devices that take most: with them the time is least."""
        order = shards - ranks / shards.shape[1]
        return np.asarray(order >= -np.sort(-order, axis=1)[row, column][:, None])

    # a little more than the longest: what is added here and taken off above may be rounded
    low, high = np.zeros(len(sizes)), (bounds[:, -1].max() + besides.max(axis=1)) * (1 + 1e-9)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        shards = taken(middle, caps)
        suffices = (shards * takes_part(shards)).sum(axis=1) >= sizes
        low, high = np.where(suffices, low, middle), np.where(suffices, middle, high)
    enough = taken(high, caps)
    caps = caps * takes_part(enough)
    return _topped_up(times, besides, taken(low, caps), np.minimum(enough, caps), sizes, smallest)


def _topped_up(
    times: FloatArray, besides: FloatArray, shards: FloatArray, enough: FloatArray, sizes: FloatArray, smallest: int
) -> FloatArray:
    """(N, n) `shards` raised towards `enough` until they sum to the micro-batches.

    A whole top-up takes every device the same time. GPU 0, which holds most, is asked last.
    """
    order = np.roll(np.arange(shards.shape[1]), -1)
    extra = (enough - shards)[:, order]
    missing = (sizes - shards.sum(axis=1))[:, None]
    missing = missing - (np.cumsum(extra, axis=1) - extra)  # when each is asked
    shards = shards[:, order]
    parts = shards + np.clip(missing, 0, extra)
    # If a partial top-up is slower than a whole one (a faster kernel starts there), whole ones are
    # given, and those who got none give back the surplus.
    wholes = shards + np.where(missing > 0, extra, 0)
    spare = np.where(missing > 0, 0, np.maximum(shards - smallest, 0))[:, ::-1]
    surplus = (wholes.sum(axis=1) - sizes)[:, None] - (np.cumsum(spare, axis=1) - spare)
    wholes -= np.clip(surplus, 0, spare)[:, ::-1]
    slowest_of_parts, slowest_of_wholes = (
        (times[order, shards_now.astype(int)] + besides[:, order]).max(axis=1) for shards_now in (parts, wholes)
    )
    are_wholes = (wholes.sum(axis=1) == sizes) & (slowest_of_wholes < slowest_of_parts)
    return np.asarray(np.where(are_wholes[:, None], wholes, parts)[:, np.argsort(order)])
