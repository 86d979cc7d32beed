"""What every kind of hardware promises in the same words."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest

from splittune.hardware.base import DeviceMemory, Hardware, largest_readings
from splittune.hardware.cuda import CudaHardware
from splittune.hardware.virtual.hardware import VirtualHardware
from splittune.parallel import BalancedDataParallel

# What `wrap` gives the wrapper by itself, from the model, the split and the devices.
NOT_FOR_THE_CALLER = {"self", "gpu0_bsz", "module", "device_ids", "output_device", "dim", "shard_sizes", "link"}


@pytest.mark.parametrize("hardware", [Hardware, CudaHardware, VirtualHardware])
def test_wrap_names_every_option_of_the_wrapper(hardware: type) -> None:
    """The options that the docstring lists are those that the wrapper takes."""
    listed = re.search(r"`options` go to the wrapper: (.*)\.", str(hardware.wrap.__doc__))
    assert listed is not None
    taken = set(inspect.signature(BalancedDataParallel.__init__).parameters) - NOT_FOR_THE_CALLER
    assert set(re.findall(r"`(\w+)`", listed[1])) == taken


def test_the_batchs_peak_is_that_of_forward_and_backward_where_it_is_known() -> None:
    """The update's peak is no part of it; without the phases' own peaks the trial's stands for it."""
    told = DeviceMemory(
        device=0,
        total_bytes=100,
        outside_bytes=0,
        peak_allocated_bytes=90,
        peak_reserved_bytes=95,
        micro_step_peak_bytes=70,
        update_peak_bytes=90,
    )
    assert told.batch_peak_bytes == 70
    assert replace(told, micro_step_peak_bytes=None).batch_peak_bytes == 90


def test_several_readings_are_one_by_their_largest_figures() -> None:
    """Device by device; the rest is the first reading's, and a reading without devices leaves none."""

    def read(device: int, outside: int, allocated: int, reserved: int) -> DeviceMemory:
        return DeviceMemory(
            device=device,
            total_bytes=100,
            outside_bytes=outside,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            resting_bytes=outside,
        )

    first, second = (read(0, 1, 20, 30), read(1, 5, 6, 7)), (read(0, 2, 10, 40), read(1, 5, 6, 7))
    assert largest_readings([first, second]) == (replace(read(0, 2, 20, 40), resting_bytes=1), read(1, 5, 6, 7))
    assert largest_readings([first, ()]) == largest_readings([]) == ()
