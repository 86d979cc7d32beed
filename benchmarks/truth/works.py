"""From the calls of a trace to their work, and the order in which a card does it."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from splittune.hardware.virtual import autocast  # noqa: F401  registers operators that traces hold
from splittune.hardware.virtual.roofline import Work, work_of
from splittune.hardware.virtual.timeline import LAUNCH_S


@functools.cache
def work_of_call(call: str) -> Work:
    """The work of a call as a `Trace` describes it; nothing is run, and no memory taken."""
    name, args, kwargs, out = (_made(part) for part in json.loads(call))
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return work_of(operator, args, kwargs or {}, out, _tensors((*args, *(kwargs or {}).values())), _tensors((out,)))


def step_s(kernel_s: NDArray[np.float64], order: NDArray[np.int32]) -> float:
    """Seconds of a step of which call `order[i]` is launched as the i-th and takes `kernel_s[order[i]]`.

    As on the timeline of a virtual card: a kernel starts when it has been launched and the one before it is done. So
    the end is the latest, over all operations, of its launch and the kernels from it on.
    """
    kernels = kernel_s[order]
    launched = LAUNCH_S * np.arange(1, len(order) + 1)
    return float(np.max(launched + np.cumsum(kernels[::-1])[::-1]))


def _made(value: Any) -> Any:
    """The inverse of the trace's description, with tensors that have sizes alone."""
    if isinstance(value, list):
        return [_made(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "t" in value:
        return torch.empty_strided(value["n"], value["s"], dtype=getattr(torch, value["t"]), device="meta")
    return {key: _made(each) for key, each in value["k"].items()} if "k" in value else value["o"]


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
