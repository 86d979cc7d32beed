"""Shards that finish together: every card's own share in closed form, from its time curve and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from splittune.search.candidates.table import Floats, SplitTable
from splittune.split import SplitSpace

# Seconds for each of many shares.
TimeOfShares = Callable[[Floats], Floats]

_HALVINGS = 20


def balanced_table(space: SplitSpace, pairs: Floats, curves: Sequence[TimeOfShares], most_shares: Floats) -> SplitTable:
    """For every micro-batch and every number of cards taking part, the shards whose slowest card is fastest.

    A time T is wanted within which the cards can take the micro-batch: card i takes the largest share that its curve
    does in T, at most what its memory holds, and those that take most take part; T is found by halving. With lines this
    is the closed form ``T = (m + sum a_i / b_i) / sum 1 / b_i``. Each is there with GPU 0 and without.

    Args:
        space: of any shares; a card of it that takes part has at least `min_shard_size`, and all do where that is not 0.
        pairs: (N, 2) accumulation steps and the largest micro-batch, of `micro_batches`.
        curves: each card's seconds for a share.
        most_shares: (C, N, n) the largest shares that fit, by C ways to tell, the surest first: there is a split for each.
    """
    sizes = pairs[:, 1]
    n, largest = space.num_devices, int(sizes.max())
    shares = np.arange(largest + 1, dtype=float)
    times = np.stack([curve(shares) for curve in curves])
    caps = np.minimum(most_shares, sizes[None, :, None])
    caps = np.where(caps < space.min_shard_size, 0, np.floor(caps))
    is_new = np.ones(caps.shape[:2], dtype=bool)
    is_new[1:] = (caps[1:] != caps[:-1]).any(axis=2)
    # of cards that take as much those are asked first that hold most for sure, but GPU 0, which is also left out
    certain = np.where(np.arange(n) == 0, np.inf, most_shares[0])
    ranks = np.argsort(np.argsort(-certain, axis=1, kind="stable"), axis=1)
    ways = [np.broadcast_to(one, (len(caps), *one.shape))[is_new] for one in (pairs, ranks)]
    rows = np.column_stack([ways[0], caps[is_new], ways[1]])
    if not space.min_shard_size:
        rows = np.concatenate([rows, np.where(np.arange(2 * n + 2) == 2, 0.0, rows)])
    counts = np.arange(n if space.min_shard_size else 1, n + 1)
    most = np.cumsum(-np.sort(-rows[:, 2 : n + 2], axis=1), axis=1)[:, counts - 1]
    which, count = np.nonzero(most >= rows[:, 1:2])
    rows, counts = rows[which], counts[count]
    shards = _balanced(times, rows, counts, space.min_shard_size)
    keep = (shards >= space.min_shard_size).all(axis=1) & (shards.sum(axis=1) == rows[:, 1])
    return SplitTable(global_batch_size=space.global_batch_size, steps=rows[keep, 0], shards=shards[keep])


def _balanced(times: Floats, rows: Floats, counts: NDArray[np.int64], smallest: int) -> Floats:
    """(N, n) shards of at most `counts` cards that sum to the micro-batch, with the fastest slowest card.

    Rows hold steps, the micro-batch, n limits, and the n ranks of the cards among those that could take as much.
    """
    sizes, limits, ranks = rows[:, 1], *np.split(rows[:, 2:], 2, axis=1)
    own_times, cards = times, np.arange(len(times))
    # a share that takes longer than a larger one, as before another kernel's first, is none to stop at
    times = np.minimum.accumulate(times[:, ::-1], axis=1)[:, ::-1]
    low, high = np.zeros(len(sizes)), np.full(len(sizes), float(times[:, -1].max()))
    row, column = np.arange(len(sizes)), counts - 1

    def taken(within: Floats) -> Floats:
        shares = np.stack([np.searchsorted(own, within, side="right") - 1 for own in times], axis=1).astype(float)
        return np.asarray(np.minimum(np.maximum(shares, smallest), limits))

    def takes_part(shares: Floats) -> NDArray[np.bool_]:
        """Those that take most, which the least time needs."""
        order = shares - ranks / shares.shape[1]
        return np.asarray(order >= -np.sort(-order, axis=1)[row, column][:, None])

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        shares = taken(middle)
        suffices = (shares * takes_part(shares)).sum(axis=1) >= sizes
        low, high = np.where(suffices, low, middle), np.where(suffices, middle, high)
    enough = taken(high)
    limits = limits * takes_part(enough)
    shards = taken(low)
    # what is still missing takes all cards that have room for it the same time; GPU 0, which holds most, is asked last
    order = np.roll(cards, -1)
    extra = (np.minimum(enough, limits) - shards)[:, order]
    missing = (sizes - shards.sum(axis=1))[:, None]
    missing = missing - (np.cumsum(extra, axis=1) - extra)  # when each is asked
    shards = shards[:, order]
    parts = shards + np.clip(missing, 0, extra)
    # where a part of it takes longer than all of it, it is all or nothing, and those with nothing give up what is too much
    wholes = shards + np.where(missing > 0, extra, 0)
    spare = np.where(missing > 0, 0, np.maximum(shards - smallest, 0))[:, ::-1]
    excess = (wholes.sum(axis=1) - sizes)[:, None] - (np.cumsum(spare, axis=1) - spare)
    wholes -= np.clip(excess, 0, spare)[:, ::-1]
    slowest = [own_times[order, way.astype(int)].max(axis=1) for way in (parts, wholes)]
    are_wholes = (wholes.sum(axis=1) == sizes) & (slowest[1] < slowest[0])
    return np.asarray(np.where(are_wholes[:, None], wholes, parts)[:, np.argsort(order)])
