"""Which devices of a job are so alike that people read of them in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splittune.report.diagnosis import LEVEL_FRACTION

if TYPE_CHECKING:
    from splittune.hardware.base import Device, DeviceMemory


def like_devices(devices: Sequence[Device], *readings: Sequence[DeviceMemory]) -> tuple[tuple[int, ...], ...]:
    """The devices' indices, neighbours that are alike together: ``((0,), (1, 2, 3))``.

    Alike are devices of one name and size. In each of `readings`, which have a reading for every
    device, others hold as much of them and this job takes as much, to `LEVEL_FRACTION` of the size.
    """
    groups: list[list[int]] = []
    for place in range(len(devices)):
        if groups and _are_alike(devices, groups[-1][0], place, readings):
            groups[-1].append(place)
        else:
            groups.append([place])
    return tuple(tuple(devices[place].index for place in group) for group in groups)


def _are_alike(devices: Sequence[Device], one: int, other: int, readings: Sequence[Sequence[DeviceMemory]]) -> bool:
    if (devices[one].name, devices[one].total_bytes) != (devices[other].name, devices[other].total_bytes):
        return False
    tolerance = LEVEL_FRACTION * devices[one].total_bytes
    return all(
        abs(memory[one].outside_bytes - memory[other].outside_bytes) <= tolerance
        and abs(memory[one].peak_reserved_bytes - memory[other].peak_reserved_bytes) <= tolerance
        for memory in readings
    )
