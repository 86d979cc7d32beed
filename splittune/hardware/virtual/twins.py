"""Virtual GPUs that stand for cards that are there: figures of the catalog, memory as it was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splittune.errors import DeviceError
from splittune.hardware.base import Device, DeviceMemory
from splittune.hardware.virtual.driver_names import gpu_called
from splittune.hardware.virtual.hardware import CUDA_CONTEXT_BYTES, VirtualHardware
from splittune.units import format_bytes


def twins_of(devices: Sequence[Device], memory: Sequence[DeviceMemory]) -> VirtualHardware:
    """Virtual GPUs of the same kinds, with as much room as the cards had, and as much held outside.

    Worked: an RTX 3090 of 23.69 GiB of which 1.69 GiB were held outside gives a virtual RTX 3090 with 22 GiB for the
    job. Where less is held than a CUDA context takes, the twin has so much more in all.

    Raises:
        DeviceError: a card is not in the catalog.
    """
    gpus, occupied = [], []
    for device, reading in zip(devices, memory, strict=True):
        gpu = gpu_called(device.name, device.total_bytes)
        if gpu is None:
            raise DeviceError(
                f"GPU {device.index} is a {device.name} of {format_bytes(device.total_bytes)}, which is not in the "
                "catalog of GPUs"
            )
        room = reading.total_bytes - reading.outside_bytes
        outside = max(CUDA_CONTEXT_BYTES, reading.outside_bytes)
        gpus.append(replace(gpu, total_bytes=max(1, room) + outside))
        occupied.append(outside - CUDA_CONTEXT_BYTES)
    return VirtualHardware(gpus, occupied_bytes=occupied)
