"""A virtual GPU that stands for a card has its figures, and the room that it had."""

from __future__ import annotations

import pytest

from splittune.errors import DeviceError
from splittune.hardware.base import Device, DeviceMemory
from splittune.hardware.virtual.hardware import CUDA_CONTEXT_BYTES
from splittune.hardware.virtual.twins import twins_of
from splittune.units import GIB, MIB

TOTAL = 24_259 * MIB  # what torch sees of an RTX 3090


def card(name: str = "NVIDIA GeForce RTX 3090", total_bytes: int = TOTAL) -> Device:
    return Device(index=0, name=name, torch_device="cuda:0", total_bytes=total_bytes)


def reading(outside_bytes: int, total_bytes: int = TOTAL) -> DeviceMemory:
    return DeviceMemory(
        device=0,
        total_bytes=total_bytes,
        outside_bytes=outside_bytes,
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
    )


@pytest.mark.parametrize("outside", [0, MIB, CUDA_CONTEXT_BYTES, 4 * GIB])
def test_a_twin_has_the_room_that_the_card_had(outside: int) -> None:
    """Whatever others held, and where a context is smaller than it is taken to be."""
    twin = twins_of([card()], [reading(outside)])
    (gpu,) = twin.gpus
    assert gpu.name == "RTX3090"
    assert gpu.total_bytes - twin.outside_bytes[0] == TOTAL - outside
    assert twin.outside_bytes[0] == max(outside, CUDA_CONTEXT_BYTES)


def test_a_cap_on_the_process_is_the_twins_too() -> None:
    """A reading's total is lower then, and the card is known by its own."""
    twin = twins_of([card()], [reading(GIB, total_bytes=6 * GIB)])
    assert twin.gpus[0].total_bytes - twin.outside_bytes[0] == 5 * GIB


def test_an_unknown_card_has_no_twin() -> None:
    """The message names it."""
    with pytest.raises(DeviceError, match=r"GPU 0 is a Quadro 9 of 2.00 GiB, which is not in the catalog of GPUs"):
        twins_of([card("Quadro 9", 2 * GIB)], [reading(0)])
