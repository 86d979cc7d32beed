"""Attention with dropout in one kernel, as CUDA has it: the CPU's own fused kernel knows none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splittune.hardware.virtual.kernels import TemporaryKernels

_aten = torch.ops.aten


def fused_attention() -> TemporaryKernels:
    """Have ``scaled_dot_product_attention`` with dropout on the CPU run in one operation; may be nested.

    The CPU's fused kernel takes no dropout: torch computes attention there in parts, and keeps weights and masks of
    length x length. CUDA's kernels keep a seed, and draw the mask anew in backward. Worked: training GPT-2 of 12 layers
    and 12 heads on 12 x 512 tokens in bfloat16 took 8,931 MiB on an H100 (torch 2.11), where in parts it would be
    14,488 MiB and with these kernels is 8,989 MiB.

    Left as they are: attention without dropout, that of which CUDA too computes in parts (double precision, other than
    four dimensions, fused kernels switched off), and such as has a mask with a gradient.
    """
    return _KERNELS


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", "AutogradCPU")
    library.impl("scaled_dot_product_attention", _attention)
    return library


_KERNELS = TemporaryKernels(_register)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    out: Tensor
    if dropout_p > 0 and _is_fused_on_cuda(query, key, value, attn_mask):
        out = _Attention.apply(query, key, value, attn_mask, dropout_p, is_causal, scale)  # type: ignore[no-untyped-call]
    else:
        out = _aten.scaled_dot_product_attention.default.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out


def _is_fused_on_cuda(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return (
        all(each.dim() == 4 and each.dtype != torch.double and not each.is_nested for each in (query, key, value))
        and (mask is None or not mask.requires_grad)
        and (torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled())
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        ctx.options = dropout_p, is_causal, scale
        out, logsumexp, seed = attention_with_dropout(query, key, value, mask, *ctx.options)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp, seed)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        found = attention_with_dropout_backward(grads[0], *ctx.saved_tensors, *ctx.options)
        return *found, None, None, None, None


@torch.library.custom_op("splittune::attention_with_dropout", mutates_args=())
def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of (N, H, L, E) to (N, G, S, E), room for the logarithms of its sums (N, H, L), and the mask's seed.

    G divides H: in grouped attention several heads share keys and values.
    """
    seed = torch.empty((), dtype=torch.long).random_()
    weights, kept = _weights(query, key, mask, seed, dropout_p, is_causal, scale)
    out, logsumexp = _empty(query, value)
    out.copy_((weights * kept).to(value.dtype) @ _for_each_head(value, query))
    return out, logsumexp, seed


@attention_with_dropout.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_options: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return *_empty(query, value), query.new_empty((), dtype=torch.long)


@torch.library.custom_op("splittune::attention_with_dropout_backward", mutates_args=())
def attention_with_dropout_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,  # noqa: ARG001  read by the kernels this stands for
    logsumexp: Tensor,  # noqa: ARG001
    seed: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    weights, kept = _weights(query, key, mask, seed, dropout_p, is_causal, scale)
    shared = query.shape[1] // key.shape[1]
    value_grad = (weights * kept).to(grad.dtype).transpose(-2, -1) @ grad
    slope = (grad @ _for_each_head(value, query).transpose(-2, -1)).float() * kept
    slope = weights * (slope - (slope * weights).sum(-1, keepdim=True)) * _scale(query, scale)
    slope = slope.to(query.dtype)
    query_grad, key_grad = slope @ _for_each_head(key, query), slope.transpose(-2, -1) @ query
    grads = (query_grad, *(each.unflatten(1, (-1, shared)).sum(2) for each in (key_grad, value_grad)))
    like = (torch.empty_like(source).copy_(each) for source, each in zip((query, key, value), grads, strict=True))
    return tuple(like)  # type: ignore[return-value]


@attention_with_dropout_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _empty(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The result, whose positions lie as the query's do, and its sums."""
    width = value.shape[-1]
    out = torch.empty_like(query) if width == query.shape[-1] else query.new_empty((*query.shape[:-1], width))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    seed: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """What each position attends to, (N, H, L, S) in float32, and what dropout makes of it: 0 or 1 / (1 - p)."""
    scores = (query @ _for_each_head(key, query).transpose(-2, -1)).float() * _scale(query, scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(int(seed)))
    # a row with nothing to attend to gives zeros, as the fused kernels have it
    return torch.softmax(scores, -1).nan_to_num(0.0), (drawn >= dropout_p) / (1 - dropout_p)


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _for_each_head(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values, one for every head of the query."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)
