"""A config with every field filled in."""

from __future__ import annotations

from splittune.config import SplitConfig
from splittune.hardware.base import Device
from splittune.split import BatchSplit
from splittune.units import GIB

SPLIT = BatchSplit(global_batch_size=24, accumulation_steps=2, shard_sizes=(3, 4, 5))
CONFIG = SplitConfig(
    split=SPLIT,
    devices=tuple(Device(index=i, name="RTX3090", torch_device="cpu", total_bytes=24 * GIB) for i in range(3)),
    min_headroom_bytes=(GIB, 0, 0),
    planned_peak_reserved_bytes=(20 * GIB,) * 3,
    virtual_spec="3xRTX3090",
    is_modelled=True,
    throughput=152.4,
    step_time_s=0.42,
    seed=7,
    eval_batch_size=96,
)
