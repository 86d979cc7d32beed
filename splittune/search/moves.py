"""Steps from one split to a better one with the same micro-batch: pure integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

from splittune.split import spread_evenly

if TYPE_CHECKING:
    from splittune.search.shares import Group

BALANCED = 1.05
"""Devices whose busy times differ by less than this factor count as equally busy."""


def moved(
    shard_sizes: Sequence[int], source: Group, target: Group, num_samples: int, smallest: int
) -> tuple[int, ...] | None:
    """The shards after `num_samples` went from one group to another; None when too few would be left.

    ``((4, 6, 6), (0,), (1, 2), 2, smallest=0)`` gives ``(2, 7, 7)``.
    """
    shards = list(shard_sizes)
    for group, change in ((source, -num_samples), (target, num_samples)):
        amount = sum(shard_sizes[device] for device in group) + change
        if amount < 0:
            return None
        for device, shard in zip(group, spread_evenly(amount, len(group)), strict=True):
            shards[device] = shard
    return tuple(shards) if min(shards) >= smallest else None


def distance(shard_sizes: Sequence[int], other: Sequence[int], source: Group, target: Group) -> int:
    """How many samples went from `source` to `target` to make `other`; 0 where no such move makes it."""
    num_samples = sum(shard_sizes[device] - other[device] for device in source)
    return num_samples if moved(shard_sizes, source, target, num_samples, smallest=0) == tuple(other) else 0


def directions(groups: Sequence[Group], busy_s: Sequence[float] | None) -> Iterator[tuple[Group, Group]]:
    """The pairs (source, target) worth a move, best first: away from the busiest device.

    A step takes as long as its busiest device, so taking work from any other cannot shorten it. Where nobody knows
    which is the busiest every pair is worth a try.
    """
    pairs = list(permutations(groups, 2))
    if busy_s is None:
        yield from pairs
        return
    busy = {group: max(busy_s[device] for device in group) for group in groups}
    pairs.sort(key=lambda pair: (-busy[pair[0]], busy[pair[1]]))
    yield from (pair for pair in pairs if busy[pair[0]] * BALANCED >= max(busy_s))


def rebalanced(
    shard_sizes: Sequence[int], busy_s: Sequence[float] | None, groups: Sequence[Group]
) -> tuple[int, ...] | None:
    """Shards in proportion to the speed the groups showed, in samples per busy second; None where that is not known.

    ``((8, 8), (2.0, 1.0), ((0,), (1,)))`` gives ``(5, 11)``: the second device is twice as fast. None, too, where
    the devices are equally busy already.
    """
    if busy_s is None:
        return None
    amounts = [sum(shard_sizes[device] for device in group) for group in groups]
    busy = [max(busy_s[device] for device in group) for group in groups]
    if min(amounts) == 0 or min(busy) <= 0 or max(busy) <= BALANCED * min(busy):
        return None
    speeds = [amount / seconds for amount, seconds in zip(amounts, busy, strict=True)]
    exact = [sum(amounts) * speed / sum(speeds) for speed in speeds]
    rounded = [int(amount) for amount in exact]
    by_remainder = sorted(range(len(groups)), key=lambda i: (rounded[i] - exact[i], -i))
    for i in by_remainder[: sum(amounts) - sum(rounded)]:
        rounded[i] += 1
    shards = list(shard_sizes)
    for group, amount in zip(groups, rounded, strict=True):
        for device, shard in zip(group, spread_evenly(amount, len(group)), strict=True):
            shards[device] = shard
    return tuple(shards)
