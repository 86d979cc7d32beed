"""Modelled time of one operation: its arithmetic or its memory traffic, at published peaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from splittune.hardware.virtual.catalog import GpuModel

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
# The CPU's own attention kernels: same leading arguments, and the same count, as the CUDA ones they
# stand for.
_SAME_FLOPS_AS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (_aten._scaled_dot_product_flash_attention, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        _aten._scaled_dot_product_flash_attention_backward,
        4,
    ),
}


class Work(NamedTuple):
    """What one operation asks of a GPU, whichever it is."""

    num_flops: int
    num_bytes: int
    """Of every tensor it reads or writes, once each."""
    is_half: bool
    """Whether its arithmetic is in half precision."""


def kernel_time_s(work: Work, gpu: GpuModel) -> float:
    """Seconds for one operation on `gpu`, modelled: max(FLOPs / peak, bytes / bandwidth).

    Half-precision operands use the half-precision peak. Worked: a 1024 x 1024 matrix product in
    float32 is 2.1e9 FLOPs; at 35.6e12 FLOP/s that is 60 us, and its 12.6 MB at 936e9 B/s would be
    13 us.
    """
    peak = gpu.half_flops_per_s if work.is_half else gpu.fp32_flops_per_s
    return max(work.num_flops / peak, work.num_bytes / gpu.memory_bandwidth_bytes_per_s)


def work_of(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, touched: Sequence[Tensor], *, has_flops: bool
) -> Work:
    """The work of one call, which reads or writes the tensors `touched`."""
    num_flops = count_flops(func, args, kwargs, out) if has_flops else 0
    return Work(
        num_flops=num_flops,
        num_bytes=sum(tensor.nbytes for tensor in touched),
        is_half=num_flops > 0 and any(tensor.dtype in _HALF for tensor in touched),
    )


def has_flops(func: Any) -> bool:
    """True where torch counts the operator's FLOPs; every other one is bound by its bytes."""
    return func._schema.name in _SAME_FLOPS_AS or func._overloadpacket in flop_registry


def count_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one call, 0 where torch has no formula for it.

    The count is torch's own (torch.utils.flop_counter): matrix products, convolutions, attention,
    forward and backward, two for each multiply-add. Except the backward of a convolution: torch
    counts ``groups`` times too much for the weight's gradient. Each gradient takes what the forward
    takes, in the same shapes. Worked: a depthwise 3 x 3 convolution of 64 channels over 8 images of
    56 x 56 is 28.9e6 FLOPs forward and 57.8e6 backward, of which torch would make 1.9e9.
    """
    alias = _SAME_FLOPS_AS.get(func._schema.name)
    if alias is not None:
        packet, num_args = alias
        *before, query, key, value = args[:num_args]
        return int(flop_registry[packet](*before, query, *_for_each_head(query, key, value), out_val=out))
    if func._overloadpacket is _aten.convolution_backward:
        grad, inputs, weight, _bias_sizes, *options, wanted = args
        forward = int(flop_registry[_aten.convolution](inputs, weight, None, *options, out_val=grad))
        return forward * (bool(wanted[0]) + bool(wanted[1]))
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _for_each_head(query: torch.Tensor, *shared: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values shaped as if every head of the query had its own: in grouped attention it does as much work.

    The formula of torch 2.9 refuses groups.
    """
    num_heads = query.shape[1]
    return [torch.empty((each.shape[0], num_heads, *each.shape[2:]), device="meta") for each in shared]
