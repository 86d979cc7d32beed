"""Devices that are alike stand in one line; those that differ in anything a reader would want to know do not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splittune.hardware.base import Device, DeviceMemory
from splittune.report.like_devices import like_devices
from splittune.units import GIB


def cards(*names: str, first: int = 0) -> list[Device]:
    return [
        Device(index=first + place, name=name, torch_device="cpu", total_bytes=8 * GIB)
        for place, name in enumerate(names)
    ]


def readings(*gib: tuple[float, float]) -> list[DeviceMemory]:
    """What others hold of each device, and what this job took."""
    return [
        DeviceMemory(
            device=index,
            total_bytes=8 * GIB,
            outside_bytes=int(outside * GIB),
            peak_allocated_bytes=int(taken * GIB),
            peak_reserved_bytes=int(taken * GIB),
        )
        for index, (outside, taken) in enumerate(gib)
    ]


def test_neighbours_of_one_kind_are_together() -> None:
    """By name and size, whatever is read of them being about the same."""
    assert like_devices(cards("A", "A", "B", "A"), readings((1, 2), (1.2, 2.3), (1, 2), (1, 2))) == ((0, 1), (2,), (3,))
    assert like_devices(cards("A", "A")) == ((0, 1),)


def test_more_held_by_others_sets_a_device_apart() -> None:
    """So does more taken by this job, in any of the readings."""
    even = readings((1, 2), (1, 2))
    assert like_devices(cards("A", "A"), readings((3, 2), (1, 2))) == ((0,), (1,))
    assert like_devices(cards("A", "A"), even, readings((1, 2), (1, 4))) == ((0,), (1,))


def test_indices_are_those_of_the_job() -> None:
    """Devices 1 to 3 of a job keep their numbers."""
    assert like_devices(cards("A", "A", "A", first=1), readings((1, 2), (1, 2), (1, 2))) == ((1, 2, 3),)
    assert like_devices([]) == ()


@given(st.lists(st.tuples(st.sampled_from("AB"), st.floats(0, 4), st.floats(0, 4)), max_size=8))
def test_every_device_is_in_one_group(drawn: list[tuple[str, float, float]]) -> None:
    """In order, none twice, and none differs from the first of its group by more than 5 % of its size."""
    devices = cards(*(name for name, _, _ in drawn))
    memory = readings(*((outside, taken) for _, outside, taken in drawn))
    groups = like_devices(devices, memory)
    assert [index for group in groups for index in group] == list(range(len(drawn)))
    for first, *others in groups:
        for other in others:
            assert devices[other].name == devices[first].name
            assert abs(memory[other].peak_reserved_bytes - memory[first].peak_reserved_bytes) <= 0.05 * 8 * GIB
