"""Trials with the memory that they read, in MiB."""

from __future__ import annotations

from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit
from tests.search.problem import MIB


def memory(device: int, peak: float, **known: float) -> DeviceMemory:
    """Readings in MiB; the allocator holds what is live, and the device has 1000, unless told
    otherwise.
    """
    known = {"total_bytes": 1000, "outside_bytes": 0, "peak_reserved_bytes": peak, **known}
    return DeviceMemory(
        device=device, peak_allocated_bytes=int(peak * MIB), **{name: int(mib * MIB) for name, mib in known.items()}
    )


def ran(tried: BatchSplit, *readings: DeviceMemory | float) -> Measurement:
    told = tuple(memory(i, one) if isinstance(one, int | float) else one for i, one in enumerate(readings))
    return Measurement(split=tried, outcome=Outcome.OK, whole_step_times_s=(1.0,), memory=told)
