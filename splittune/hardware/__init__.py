"""The devices a job runs on, real or virtual: their memory, their clock, a wrapper for a split."""

from splittune.hardware.base import Device, DeviceConditions, DeviceMemory, Hardware
from splittune.hardware.cuda import CudaHardware
from splittune.hardware.oom import is_out_of_memory, is_sticky
from splittune.hardware.resolve import resolve_hardware

__all__ = [
    "CudaHardware",
    "Device",
    "DeviceConditions",
    "DeviceMemory",
    "Hardware",
    "is_out_of_memory",
    "is_sticky",
    "resolve_hardware",
]
