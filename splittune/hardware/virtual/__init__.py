"""Virtual GPUs: the user's real step on the CPU, with accounted memory and modelled time."""

from splittune.hardware.virtual.catalog import GpuModel, find_gpu, parse_gpus
from splittune.hardware.virtual.hardware import VirtualHardware

__all__ = ["GpuModel", "VirtualHardware", "find_gpu", "parse_gpus"]
