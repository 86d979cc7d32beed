"""BatchNorm over several shares of a batch: statistics weighted by counts, and exact gradients of them.

Each device reduces its own share to a part, ``(mean, variance, count)`` of every channel. Somebody
makes of all parts those of the whole, and brings them back: `pooled` is the arithmetic. In backward
the gradient of the whole statistics is the sum over devices, and each share's own part of it
follows. Only numbers for every channel travel; what is as large as the activations is done by
torch's own kernels, and kept for backward no more than BatchNorm itself keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812  as everybody writes it
from torch.nn.modules.batchnorm import _BatchNorm

from splittune.parallel.transfer import apply

_HALF = (torch.float16, torch.bfloat16)

Pool = Callable[[Tensor], Tensor]
"""From a share's part, ``(3, channels)``, to the whole's, differentiable."""


def uses_batch_statistics(layer: _BatchNorm) -> bool:
    """Whether it normalises by what it is given, rather than by running statistics."""
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def batch_norm(layer: _BatchNorm, x: Tensor, pool: Pool, *, is_counted: bool = True) -> Tensor:
    """``layer(x)`` by the statistics of the whole batch, where `x` is a share of it.

    Worked: shares ``[1, 2, 3]`` and ``[6]`` of one channel are parts ``(2, 2/3, 3)`` and ``(6, 0,
    1)``, and the whole is ``(3, 3.5, 4)``: both are normalised by mean 3 and variance 3.5. Running
    statistics are updated as by the whole batch. Of `x` that is not `is_counted`, as the samples of
    a stand-in, none enters the statistics.

    Raises:
        RuntimeError: in a backward pass through the gradient itself (``create_graph=True``).
    """
    layer._check_input_dim(x)
    whole = pool(apply(_Part, x, is_counted))
    mean, var = whole[0], whole[1]
    if layer.training and layer.track_running_stats:
        with torch.no_grad():
            _update_statistics(layer, *whole.detach().unbind())
    scale, shift = layer._parameters.get("weight"), layer._parameters.get("bias")
    weight = torch.ones_like(mean) if scale is None else scale.to(mean.dtype)
    bias = torch.zeros_like(mean) if shift is None else shift.to(mean.dtype)
    weight, bias = apply(_Through, weight, bias, mean, var, layer.eps)
    return F.batch_norm(x, mean.detach(), var.detach(), weight, bias, False, 0.0, layer.eps)


class Shares(NamedTuple):
    """What the parts of n shares have in the whole; both ``(n, channels)``."""

    shares: Tensor
    """Each share's part of the count."""
    deltas: Tensor
    """Each share's mean less that of the whole."""

    def gradients(self, grad: Tensor) -> Tensor:
        """Those of the parts, ``(n, 3, channels)``, where `grad` is that of the whole."""
        by_var = self.shares * grad[1]
        return torch.stack([self.shares * grad[0] + 2 * by_var * self.deltas, by_var, torch.zeros_like(by_var)], 1)


def pooled(parts: Tensor) -> tuple[Tensor, Shares]:
    """The whole's mean, biased variance and count, ``(3, channels)``, out of `parts`, ``(n, 3, channels)``.

    The variance is the mean of the variances and of the squared distances of the means, each
    weighted by its count: exact also where means are far larger than variances, as a sum of squares
    is not.
    """
    means, variances, counts = parts.unbind(1)
    total = counts.sum(0)
    shares = counts / total
    mean = (shares * means).sum(0)
    deltas = means - mean
    variance = (shares * (variances + deltas * deltas)).sum(0)
    return torch.stack([mean, variance, total]), Shares(shares, deltas)


def refuse_single_value(count: float, x_like: str) -> None:
    """Raise as torch's BatchNorm does where no variance can be had.

    Raises:
        ValueError: there is but one value of each channel in all shares together.
    """
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {count:g} in {x_like}")


def _update_statistics(layer: _BatchNorm, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """What torch's BatchNorm does to its buffers; through .data, for autograd does not see its own update either."""
    momentum: float | Tensor = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = layer.num_batches_tracked.to(mean.dtype).reciprocal()
    unbiased = var * (count / (count - 1).clamp_min(1))
    for running, now in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        if running is not None:
            running.data.mul_(1 - momentum).add_((now * momentum).to(running.dtype))


class _Part(torch.autograd.Function):
    """Mean, biased variance and count of a share's channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_counted: bool) -> Tensor:
        num_channels = x.size(1)
        count = x.numel() // num_channels if is_counted and num_channels else 0
        dtype = torch.float32 if x.dtype in _HALF else x.dtype
        ctx.count = count
        if not count:
            return x.new_zeros((3, num_channels), dtype=dtype)
        # Half precision is read as it is and summed in float32 where the running statistics are in that. These are
        # nobody's, and momentum 0 leaves them as they are. tests/parallel/test_batch_norm_parts.py fails loudly should
        # the function, which torch.nn.BatchNorm's kernels share and torch does not document, change.
        nobodys: tuple[Tensor | None, Tensor | None] = (None, None)
        if x.dtype in _HALF:
            nobodys = x.new_zeros(num_channels, dtype=dtype), x.new_ones(num_channels, dtype=dtype)
        mean, var = torch.batch_norm_update_stats(x, nobodys[0], nobodys[1], 0.0)
        ctx.save_for_backward(x, mean)
        return torch.stack([mean.to(dtype), var.to(dtype), torch.full_like(mean, count, dtype=dtype)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.count:
            return None, None
        x, mean = ctx.saved_tensors
        by_mean, by_var = grads[0][0] / ctx.count, grads[0][1] * (2 / ctx.count)
        # (x - mean) * by_var + by_mean, in one kernel, whatever the dtype of x: sqrt(0 + 1) is 1
        return F.batch_norm(x, mean, torch.zeros_like(mean), by_var, by_mean, False, 0.0, 1.0), None


class _Through(torch.autograd.Function):
    """Weight and bias as they are; backward makes of their gradients those of mean and variance.

    With ``y = (x - mean) / sqrt(var + eps) * weight + bias`` these are ``-weight / sqrt(var + eps)`` times the bias's
    and ``-weight / (2 * (var + eps))`` times the weight's.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor, _mean: Tensor, var: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, var)
        ctx.eps = eps
        return weight.view_as(weight), bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        by_weight, by_bias = grads
        weight, var = ctx.saved_tensors
        inverse = torch.rsqrt(var + ctx.eps)
        by_mean, by_var = -weight * inverse * by_bias, -0.5 * weight * inverse * inverse * by_weight
        return by_weight, by_bias, by_mean, by_var, None
