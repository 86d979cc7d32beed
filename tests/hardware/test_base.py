"""What every kind of hardware promises in the same words."""

from __future__ import annotations

import inspect
import re

import pytest

from splittune.hardware.base import Hardware
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
