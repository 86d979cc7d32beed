"""What an operation asks of a GPU, and the modelled time that takes on one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from splittune.hardware.virtual.catalog import GpuModel
from splittune.hardware.virtual.efficiency import EFFICIENCIES, KERNEL_S, Kind

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
# The CPU's own attention kernels, and those that know dropout (`attention.py`): same leading arguments, and the same
# count, as the CUDA ones they stand for.
_SAME_FLOPS_AS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (_aten._scaled_dot_product_flash_attention, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        _aten._scaled_dot_product_flash_attention_backward,
        4,
    ),
    "splittune::attention_with_dropout": (_aten._scaled_dot_product_flash_attention, 3),
    "splittune::attention_with_dropout_backward": (_aten._scaled_dot_product_flash_attention_backward, 4),
}

# By a part of the operator's name, the first that matches; what none matches is elementwise, or a reduction where it
# gives much less than it reads.
_KINDS: tuple[tuple[str, Kind], ...] = (
    ("batch_norm", "batch norm"),
    ("layer_norm", "layer norm"),
    ("group_norm", "layer norm"),
    ("rms_norm", "layer norm"),
    ("softmax", "softmax"),
    ("attention", "attention"),
    ("foreach", "update"),
    ("fused_adam", "update"),
    ("fused_sgd", "update"),
    ("fused_adagrad", "update"),
    ("baddbmm", "batched product"),
    ("bmm", "batched product"),
    ("mm", "product"),
    ("pool", "pooling"),
    ("upsample", "pooling"),
    ("embedding", "indexing"),
    ("index", "indexing"),
    ("gather", "indexing"),
    ("scatter", "indexing"),
    ("masked_select", "indexing"),
    ("sort", "indexing"),
    ("topk", "indexing"),
    ("copy", "copy"),
    ("clone", "copy"),
    ("cat", "copy"),
    ("stack", "copy"),
    ("pad", "copy"),
    ("roll", "copy"),
    ("flip", "copy"),
    ("repeat", "copy"),
    ("slice", "copy"),
    ("select", "copy"),
    ("im2col", "copy"),
    ("col2im", "copy"),
    ("unfold", "copy"),
)
_READ_A_PART = ("embedding", "index", "gather")
_FILL = ("zero_", "fill_", "bernoulli_", "normal_", "uniform_")


class Work(NamedTuple):
    """What one operation asks of a GPU, whichever it is."""

    kind: Kind
    num_flops: int
    num_bytes: int
    """Read and written, each tensor once each way."""
    is_half: bool = False
    """Whether its products are in half precision."""
    depth: int = 0
    """Of its products, if it has any: the terms of each sum."""
    num_columns: int = 0
    """Of its products: the sums for each sample or position."""
    most_bytes: int = 0
    """It moves no more than these, however much its tensors hold, for it reads a part of one; 0 for no such limit."""

    @property
    def moved_bytes(self) -> int:
        """Worked: 10 rows of 1 KiB taken from a table of 1 MiB are read at twice their size, and written: 30 KiB."""
        return min(self.num_bytes, self.most_bytes) if self.most_bytes else self.num_bytes


def kernel_time_s(work: Work, gpu: GpuModel) -> float:
    """Seconds for one operation on `gpu`, modelled.

    It is a time for starting, one for the bytes at the published bandwidth and one for the FLOPs at the published peak,
    the latter two times factors of the operation's class (`Efficiency`). Half-precision products use the half-precision
    peak, float32 ones that of ordinary cores: of TF32, which convolutions may use, the catalog's figures say nothing.
    Worked: adding 1 GB to 1 GB elementwise on an RTX 3090 moves 3e9 bytes, 3.2 ms at 936e9 B/s, times the factor.
    """
    factors = EFFICIENCIES[work.kind]
    bytes_s = work.moved_bytes * factors.per_byte / gpu.memory_bandwidth_bytes_per_s
    depth, columns = max(work.depth, 1), max(work.num_columns, 1)
    per_flop = (
        factors.per_flop + factors.by_depth / depth + factors.by_columns / columns + factors.by_both / (depth * columns)
    )
    flops_s = work.num_flops * per_flop / (gpu.half_flops_per_s if work.is_half else gpu.fp32_flops_per_s)
    return KERNEL_S + (math.hypot(bytes_s, flops_s) if factors.overlaps else bytes_s + flops_s)


def work_of(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Work:
    """The work of one call, whose tensors are `inputs`, and `outputs` those of its result."""
    operator = _of_operator(func)
    written = _once((*outputs, *(tensor for at in operator.writes_lists for tensor in args[at])))
    read = [] if operator.fills else _once(inputs)
    num_written = sum(map(_extent, written))
    num_flops = count_flops(func, args, kwargs, out) if operator.has_flops else 0
    kind, depth, num_columns = operator.kind, 0, 0
    if num_flops:
        kind, depth, num_columns = _product_of(operator.kind, func, args)
    elif kind == "batch norm" and _is_without_cudnn(inputs):
        kind = "batch norm without cuDNN"
    elif kind == "elementwise" and 2 * _most(written) <= _most(read):
        kind = "reduction"
    elif kind in ("elementwise", "copy") and _is_transposition((*read, *written)):
        kind = "transposition"
    return Work(
        kind=kind,
        num_flops=num_flops,
        num_bytes=sum(map(_extent, read)) + num_written,
        is_half=num_flops > 0 and any(tensor.dtype in _HALF for tensor in (*inputs, *outputs)),
        depth=depth,
        num_columns=num_columns,
        most_bytes=3 * num_written if operator.reads_a_part else 0,
    )


def copy_work(target: Sequence[Tensor], source: Sequence[Tensor]) -> Work:
    """The work of copying one tensor to another on the same card, each given by the plain tensors that hold it."""
    tensors = (*source, *target)
    return Work(
        kind="transposition" if _is_transposition(tensors) else "copy",
        num_flops=0,
        num_bytes=sum(map(_extent, tensors)),
    )


class _Operator(NamedTuple):
    """What is known of an operator, whatever it is called with."""

    kind: Kind
    writes_lists: tuple[int, ...]
    """Arguments that are lists of tensors and changed; a single tensor that is changed is a result too."""
    reads_a_part: bool
    """It reads of its inputs about as much as it gives."""
    fills: bool
    """It reads nothing."""
    has_flops: bool


@functools.cache
def _of_operator(func: Any) -> _Operator:
    name = func._schema.name.partition("::")[2]
    return _Operator(
        kind=next((kind for part, kind in _KINDS if part in name), "elementwise"),
        writes_lists=tuple(
            position
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(argument.type, torch.ListType)
            and not argument.kwarg_only
        ),
        reads_a_part=any(part in name for part in _READ_A_PART),
        fills=name in _FILL or name.endswith("_like") or name.startswith("new_"),
        has_flops=has_flops(func),
    )


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _most(tensors: Iterable[Tensor]) -> int:
    return max((tensor.numel() for tensor in tensors), default=0)


def _extent(tensor: Tensor) -> int:
    """Bytes of a tensor's different elements: what is expanded counts once."""
    if 0 not in tensor.stride():
        return tensor.nbytes
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def _is_without_cudnn(tensors: Iterable[Tensor]) -> bool:
    """Whether what is normalised is in bfloat16, with a channel's positions side by side: NHWC has other kernels."""
    largest = max(tensors, key=Tensor.numel)
    return largest.dtype == torch.bfloat16 and largest.is_contiguous()


def _is_transposition(tensors: Iterable[Tensor]) -> bool:
    """Whether neighbours in one of the largest tensors are no neighbours in another."""
    several = [tensor for tensor in tensors if tensor.dim() > 1 and 0 not in tensor.stride()]
    largest = _most(several)
    return len({_innermost(tensor) for tensor in several if tensor.numel() == largest > 1}) > 1


def _innermost(tensor: Tensor) -> int:
    """The dimension of several elements in which they lie closest, counted from the last."""
    dims = [(stride, dim) for dim, stride in enumerate(tensor.stride()) if tensor.shape[dim] > 1]
    return tensor.dim() - min(dims)[1] if dims else 0


def _product_of(kind: Kind, func: Any, args: Sequence[Any]) -> tuple[Kind, int, int]:
    """Class, depth and columns of an operation's products; (3, 5) by (5, 7) has depth 5 and 7 columns."""
    if func._overloadpacket in (_aten.convolution, _aten.convolution_backward):
        is_forward = func._overloadpacket is _aten.convolution
        weight, groups = (args[1], args[8]) if is_forward else (args[2], args[9])
        channels, area = weight.shape[1], math.prod(weight.shape[2:])
        num_columns = weight.shape[0] // groups
        if groups == 1:
            return "convolution", channels * area, num_columns
        if channels == 1 and num_columns <= 2:
            return "depthwise convolution", area, num_columns
        return "grouped convolution", channels * area, num_columns
    if kind in ("product", "batched product"):
        left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
        return kind, left.shape[-1], right.shape[-1]
    if kind == "attention":
        # Half its products sum over a head's width, the others have so many columns; over the sequence goes the rest,
        # which is long. So for all of them either is twice as much in the mean.
        width = next(arg for arg in args if isinstance(arg, Tensor)).shape[-1]
        return kind, 2 * width, 2 * width
    return kind, 0, 0


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
    return [
        each if each.shape[1] == num_heads else torch.empty((each.shape[0], num_heads, *each.shape[2:]), device="meta")
        for each in shared
    ]
