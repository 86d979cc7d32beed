"""Devices that measurements do not tell apart, in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product


def grouped(devices: Iterable[int], agreement: Callable[[int, int], float]) -> list[tuple[int, ...]]:
    """`devices` in groups, in the order given, all of each of which agree with one another.

    `agreement` of two is 0 or less where they are unlike; else those that agree more join first: complete
    linkage. Worked: GPU 0 was like 1 and 2 with a single sample, and unlike 3. 1, 2 and 3 were alike with 36:
    the groups are (0,) and (1, 2, 3).
    """
    order = list(devices)
    told = {frozenset(pair): agreement(*pair) for pair in combinations(order, 2)}
    groups = {device: [device] for device in order}
    for one, other in sorted(told, key=lambda pair: -told[pair]):
        ours, theirs = groups[one], groups[other]
        if ours is not theirs and all(told[frozenset(pair)] > 0 for pair in product(ours, theirs)):
            ours += theirs
            groups |= dict.fromkeys(theirs, ours)
    places = {device: place for place, device in enumerate(order)}
    return list(dict.fromkeys(tuple(sorted(groups[device], key=places.__getitem__)) for device in order))
