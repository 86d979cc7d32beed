"""How splits, speeds and devices are spelled wherever people read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from splittune.hardware.virtual.efficiency import MEDIAN_TIME_ERROR, P90_TIME_ERROR, TIME_ERROR_SOURCE
from splittune.profiling.measurement import Measurement
from splittune.split import BatchSplit
from splittune.split.batch_split import listed_shares

# Below this the two splits are called equally fast: the headline has two decimals.
LEAST_SPEEDUP = 1.005

WHY_STOPPED = {
    "converged": "The search ended because no other split is expected to be faster.",
    "models disagree": "The search ended because no other split is expected to be faster; but its last predictions "
    "were off by more than they allowed for, so a faster split may have been missed.",
    "space exhausted": "The search ended because every other split is measured or known not to fit.",
}
# What ended the search before it was done, with what to do.
CUT_SHORT = {
    "max_trials": "the search ended at its limit of trials (--max-trials); more may find a faster split.",
    "timeout": "the search ended at its limit of time (--timeout-s); more may find a faster split.",
}


def shape_of(split: BatchSplit) -> str:
    """``"2 x (4+20+20+20)"``: accumulation steps and the samples of each device."""
    return f"{split.accumulation_steps} x ({shares_of(split)})"


def shares_of(split: BatchSplit) -> str:
    """``"4+20+20+20"``: each device's samples of the largest micro-batch; of more than 16 ``"512x4+512x12"``."""
    return listed_shares(split.shard_sizes, plus="+", times="x")


def rate_of(measurement: Measurement) -> str:
    """``"5,674"`` samples/s, ``"5.67"`` where few, ``"not timed"``."""
    rate = measurement.throughput
    if rate is None:
        return "not timed"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:#.3g}"


def count_of(number: int, noun: str) -> str:
    """``"1 sample"``, ``"2 samples"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def gpus(indices: Sequence[int]) -> str:
    """``"GPU 0"``, ``"GPU 1-3"``, ``"GPU 0, 2-3"``: devices of the job, in ascending order."""
    ends = []
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        ends.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"GPU {', '.join(ends)}"


def describe_model_error() -> str:
    """What modelled figures are, and how far off such times were where somebody has measured: benchmarks/truth/."""
    return (
        f"Memory is accounted and time modelled. Of {TIME_ERROR_SOURCE}, such times were off by "
        f"{MEDIAN_TIME_ERROR:.0%} in the median, and by up to {P90_TIME_ERROR:.0%} in nine of ten."
    )
