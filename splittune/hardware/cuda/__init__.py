"""Real GPUs: devices, memory and clocks read through torch's allocator and NVML."""

from splittune.hardware.cuda.hardware import CudaHardware, count_visible_devices

__all__ = ["CudaHardware", "count_visible_devices"]
