"""How a split and its speed are spelled wherever people read them."""

from __future__ import annotations

from splittune.profiling.measurement import Measurement
from splittune.split import BatchSplit


def shape_of(split: BatchSplit) -> str:
    """``"2 x (4+20+20+20)"``: accumulation steps and the samples of each device."""
    return f"{split.accumulation_steps} x ({'+'.join(map(str, split.shard_sizes))})"


def speed_of(measurement: Measurement) -> str:
    """``"5,674.0 samples/s"``."""
    return "not timed" if measurement.throughput is None else f"{measurement.throughput:,.1f} samples/s"
