"""The devices a job runs on, real or virtual: what they are, their memory, their clock, and a wrapper for a split."""

from splittune.hardware.base import Device, DeviceMemory, Hardware
from splittune.hardware.cuda import CudaHardware
from splittune.hardware.oom import is_out_of_memory
from splittune.hardware.resolve import resolve_hardware

__all__ = ["CudaHardware", "Device", "DeviceMemory", "Hardware", "is_out_of_memory", "resolve_hardware"]
