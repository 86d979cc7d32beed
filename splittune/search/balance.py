"""Shards that finish together: every card's own share in closed form, from its time curve and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from splittune.search.curves import Curve
from splittune.search.table import Floats, SplitTable, micro_batches
from splittune.split import SplitSpace

_HALVINGS = 32


def balanced_table(
    space: SplitSpace, curves: Sequence[Curve], most_shares: Callable[[Floats, Floats], Floats]
) -> SplitTable:
    """For every micro-batch and every number of cards taking part, the shards whose slowest card is fastest.

    A time T is wanted within which the cards can take the micro-batch: card i takes the largest share that its curve
    does in T, at most what its memory holds; T is found by halving. With lines this is the closed form ``T = (m + sum a_i / b_i) / sum 1 / b_i``. Cards leave
    in order of speed, the slowest first, with GPU 0 and without.

    Args:
        space: of any shares; a card of it that takes part has at least `min_shard_size`, and all do where that is not 0.
        curves: each card's seconds for a share.
        most_shares: from accumulation steps (N,) and micro-batch sizes (N,) to the largest shares that fit, (N, n).
    """
    pairs = np.array(list(micro_batches(space)), dtype=float)
    steps, sizes = pairs[:, 0], pairs[:, 1]
    n, largest = space.num_devices, int(sizes.max())
    shares = np.arange(largest + 1, dtype=float)
    times = np.stack([np.maximum.accumulate(curve(shares)) for curve in curves])
    caps = np.minimum(most_shares(steps, sizes), sizes[:, None])
    caps = np.where(caps < space.min_shard_size, 0, np.floor(caps))
    middle = min(largest, max(1, largest // (2 * n)))
    by_speed = np.argsort(times[:, middle], kind="stable")
    groups = [by_speed[:count] for count in range(n if space.min_shard_size else 1, n + 1)]
    if not space.min_shard_size:
        others = by_speed[by_speed != 0]
        groups += [others[:count] for count in range(1, n)]
    takes_part = np.zeros((len(groups), n), dtype=bool)
    for row, group in enumerate(groups):
        takes_part[row, group] = True
    limits = (takes_part[:, None, :] * caps[None, :, :]).reshape(-1, n)
    steps, sizes = np.tile(steps, len(groups)), np.tile(sizes, len(groups))
    possible = limits.sum(axis=1) >= sizes
    shards = _balanced(times, limits[possible], sizes[possible], space.min_shard_size)
    keep = (shards >= space.min_shard_size).all(axis=1) & (shards.sum(axis=1) == sizes[possible])
    return SplitTable(global_batch_size=space.global_batch_size, steps=steps[possible][keep], shards=shards[keep])


def _balanced(times: Floats, limits: Floats, sizes: Floats, smallest: int) -> Floats:
    """(N, n) shards that sum to `sizes`, none above its limit, with the least time of the slowest card."""
    low, high = np.zeros(len(sizes)), np.full(len(sizes), float(times[:, -1].max()))

    def taken(within: Floats) -> Floats:
        shares = np.stack([np.searchsorted(row, within, side="right") - 1 for row in times], axis=1).astype(float)
        return np.asarray(np.minimum(np.maximum(shares, smallest), limits))

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        suffices = taken(middle).sum(axis=1) >= sizes
        low, high = np.where(suffices, low, middle), np.where(suffices, middle, high)
    shards = taken(low)
    # what is still missing takes all cards that have room for it the same time; GPU 0, which holds most, is asked last
    extra = np.roll(taken(high) - shards, -1, axis=1)
    missing = (sizes - shards.sum(axis=1))[:, None]
    given = np.clip(missing - (np.cumsum(extra, axis=1) - extra), 0, extra)
    return np.asarray(shards + np.roll(given, 1, axis=1))
