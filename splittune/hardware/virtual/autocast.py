"""CUDA's autocast on the CPU: while virtual cards are metered, what it would cast there is cast here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from splittune.hardware.virtual.kernels import TemporaryKernels

_HALF = (torch.float16, torch.bfloat16)
_HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key

# The lists of torch's ATen/autocast_mode.h, as of 2.13, without what the CPU's autocast casts alike. Those of them that
# the installed torch does not cast on CUDA are left out (`_is_cast_on_cuda`).
_IN_FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "dist",
    "pdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]
# These read half precision and give float32, in one kernel.
_TO_FLOAT32 = [
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
]
_IN_HALF = ["addmv", "addr", "mv"]
_IN_WIDEST = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "index_put",
    "tensordot",
    "scatter_add",
]


def cuda_autocast() -> TemporaryKernels:
    """Have ``torch.autocast("cpu")`` cast what ``torch.autocast("cuda")`` casts; may be nested.

    The CPU's leaves normalisations, softmax and powers in half precision; CUDA's takes them to float32, which changes
    what is kept for the gradient. Worked: the layer_norm of 8 x 1,024 x 768 numbers in bfloat16 keeps a copy of its
    input of 25.2 MB, where the CPU's keeps the 12.6 MB of the input itself.

    The CPU's alone casts padding, three-dimensional pooling and linear algebra; these stay as they are.
    """
    return _KERNELS


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    kinds: tuple[tuple[list[str], Callable[[Any], Callable[..., Any]]], ...] = (
        (_IN_FLOAT32, _in_float32),
        (_TO_FLOAT32, _to_float32),
        (_IN_HALF, _in_half),
        (_IN_WIDEST, _in_widest),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel of the CPU's autocast is replaced: cross_entropy_loss
        for names, kind in kinds:
            for name in filter(_is_cast_on_cuda, names):
                library.impl(name, kind(_operator(name)))
        library.impl("softmax.int", _softmax)
        library.impl("log_softmax.int", _log_softmax)
        # on CUDA no cast of its own: those of log_softmax and nll_loss, of which it consists
        library.impl("cross_entropy_loss", torch.ops.aten.cross_entropy_loss.default.decompose)
    return library


_KERNELS = TemporaryKernels(_register)


def _is_cast_on_cuda(name: str) -> bool:
    try:
        return bool(_HAS_KERNEL(f"aten::{name}", "AutocastCUDA"))
    except RuntimeError:  # no such operator in this torch
        return False


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast(operator: Any, args: Any, kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return operator(*args, **kwargs)


def _cast(value: Any, sources: tuple[torch.dtype, ...], target: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype in sources else value
    if isinstance(value, list | tuple):
        return [_cast(each, sources, target) for each in value]
    return value


def _in_float32(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_cast(arg, _HALF, torch.float32) for arg in args)
        kwargs = {key: _cast(value, _HALF, torch.float32) for key, value in kwargs.items()}
        return _without_autocast(operator, args, kwargs)

    return kernel


def _to_float32(operator: Any) -> Callable[..., Any]:
    def kernel(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype in _HALF and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return _without_autocast(operator, (tensor, *args), kwargs)

    return kernel


def _in_half(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_cast(arg, (torch.float32, *_HALF), torch.get_autocast_dtype("cpu")) for arg in args)
        return _without_autocast(operator, args, kwargs)

    return kernel


def _in_widest(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.dtype == torch.float32 for arg in args):
            args = tuple(_cast(arg, _HALF, torch.float32) for arg in args)
        return _without_autocast(operator, args, kwargs)

    return kernel


def _softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if tensor.dtype in _HALF and dtype in (None, torch.float32):
        return _softmax_to_float32(tensor, dim, False)
    return _without_autocast(torch.softmax, (tensor, dim), {"dtype": dtype})  # type: ignore[no-any-return]


def _log_softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if tensor.dtype in _HALF and dtype in (None, torch.float32):
        return _softmax_to_float32(tensor, dim, True)
    return _without_autocast(torch.log_softmax, (tensor, dim), {"dtype": dtype})  # type: ignore[no-any-return]


def _softmax_to_float32(tensor: Tensor, dim: int, is_log: bool) -> Tensor:
    out: Tensor = _SoftmaxToFloat32.apply(tensor, dim, is_log)  # type: ignore[no-untyped-call]
    return out


class _SoftmaxToFloat32(torch.autograd.Function):
    """Half precision in, float32 out, as CUDA's kernel has it: no copy of the input, and its gradient in half."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, is_log: bool) -> Tensor:
        out: Tensor = softmax_to_float32(tensor, dim, is_log)
        ctx.save_for_backward(out)
        ctx.dim, ctx.is_log, ctx.dtype = dim, is_log, tensor.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors
        return softmax_to_float32_backward(grads[0], out, ctx.dim, ctx.is_log, ctx.dtype), None, None


@torch.library.custom_op("splittune::softmax_to_float32", mutates_args=())
def softmax_to_float32(tensor: Tensor, dim: int, is_log: bool) -> Tensor:
    """Softmax, or its logarithm, in one operation as the ledger sees it."""
    return (torch.log_softmax if is_log else torch.softmax)(tensor.float(), dim)


@softmax_to_float32.register_fake
def _(tensor: Tensor, dim: int, is_log: bool) -> Tensor:  # noqa: ARG001 (torch passes what the operation takes)
    return torch.empty_like(tensor, dtype=torch.float32)


@torch.library.custom_op("splittune::softmax_to_float32_backward", mutates_args=())
def softmax_to_float32_backward(grad: Tensor, out: Tensor, dim: int, is_log: bool, dtype: torch.dtype) -> Tensor:
    """The gradient of its input, in the input's own precision."""
    if is_log:
        return (grad - out.exp() * grad.sum(dim, keepdim=True)).to(dtype)
    return (out * (grad - (grad * out).sum(dim, keepdim=True))).to(dtype)


@softmax_to_float32_backward.register_fake
def _(grad: Tensor, out: Tensor, dim: int, is_log: bool, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return torch.empty_like(out, dtype=dtype)
