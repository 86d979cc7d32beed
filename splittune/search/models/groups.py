"""Devices that measurements do not tell apart, in groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def grouped(devices: Iterable[int], are_alike: Callable[[int, int], bool]) -> list[tuple[int, ...]]:
    """`devices` in groups, each in the order given.

    A device joins the first group all of whose members it is like, else it begins a group of its own:
    ``grouped([3, 1, 2], lambda one, other: (one - other) % 2 == 0)`` gives ``[(3, 1), (2,)]``.
    """
    groups: list[list[int]] = []
    for device in devices:
        home = next((group for group in groups if all(are_alike(one, device) for one in group)), None)
        if home is None:
            groups.append([device])
        else:
            home.append(device)
    return [tuple(group) for group in groups]
