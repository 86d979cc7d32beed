"""BatchNorm over the ranks of a process group, by the statistics of all their samples.

Torch's SyncBatchNorm weighs by counts as well, and is not used, on cards neither: it refuses gloo
and the CPU, it makes the host wait for the card in every layer, and a rank's stand-in sample, which
must count nothing, would enter its statistics. One implementation for all devices is also the one
that is tested on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from splittune.errors import ConfigError
from splittune.parallel.batch_norm import Shares, batch_norm, pooled, refuse_single_value
from splittune.parallel.modules import modules_of
from splittune.parallel.transfer import apply


class SynchronisedBatchNorm(_BatchNorm):
    """BatchNorm whose statistics in training are those of the samples of all ranks; all have to run it.

    Its parameters, buffers and their names are torch's BatchNorm's. In evaluation, and where there
    is one rank or no process group, it does what that does. Worked: a rank with 7 samples and one
    with 3 normalise by the mean and variance of the 10, and the gradients are those of one device
    if each rank's loss is its part of one loss of all (a sum, or a mean times its share).

    Made of a model's layers by `synchronised_batch_norm`.
    """

    process_group: dist.ProcessGroup | None = None
    """None for the default group."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as torch's layers name it
        if not self.training or not _spans_ranks(self.process_group):
            return super().forward(input)
        return batch_norm(self, input, partial(_pool, group=self.process_group), is_counted=_NOW.is_counted)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SynchronisedBatchNorm1d(SynchronisedBatchNorm, nn.BatchNorm1d):
    """Of 2D or 3D input."""

    _check_input_dim = nn.BatchNorm1d._check_input_dim


class SynchronisedBatchNorm2d(SynchronisedBatchNorm, nn.BatchNorm2d):
    """Of 4D input."""

    _check_input_dim = nn.BatchNorm2d._check_input_dim


class SynchronisedBatchNorm3d(SynchronisedBatchNorm, nn.BatchNorm3d):
    """Of 5D input."""

    _check_input_dim = nn.BatchNorm3d._check_input_dim


_OURS: dict[type[nn.Module], type[SynchronisedBatchNorm]] = {
    nn.BatchNorm1d: SynchronisedBatchNorm1d,
    nn.BatchNorm2d: SynchronisedBatchNorm2d,
    nn.BatchNorm3d: SynchronisedBatchNorm3d,
    nn.SyncBatchNorm: SynchronisedBatchNorm,
}


def synchronised_batch_norm(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """`model` itself, its BatchNorm layers synchronised over the group's ranks from now on.

    The layers are the same objects, of another class: parameters, buffers, names, hooks and modes
    are what they were, and so are all other layers. A BatchNorm2d stays one by ``isinstance``; of
    torch's SyncBatchNorm, a group of its own is kept.

    Raises:
        ConfigError: as `check_synchronisable`; nothing has been changed.
    """
    check_synchronisable(model)
    for norm in modules_of(model):
        if isinstance(norm, _BatchNorm):
            group = getattr(norm, "process_group", None)
            norm.__class__ = _OURS.get(type(norm), type(norm))
            assert isinstance(norm, SynchronisedBatchNorm)
            norm.process_group = process_group if group is None else group
    return model


def check_synchronisable(model: nn.Module) -> None:
    """That `synchronised_batch_norm` can change every BatchNorm layer of the model.

    Raises:
        ConfigError: one is of another class than torch's, whose forward may be its own.
    """
    for name, module in model.named_modules():
        if (
            isinstance(module, _BatchNorm)
            and not isinstance(module, SynchronisedBatchNorm)
            and type(module) not in _OURS
        ):
            raise ConfigError(
                f"layer {name or '(root)'} is a {type(module).__name__}: expected torch's BatchNorm1d, 2d, 3d or "
                "SyncBatchNorm, for only of these it is known what their forward does. Replace it, or train without "
                "sync_batch_norm."
            )


def normalises_by_rank(module: nn.Module) -> bool:
    """Whether it is a BatchNorm layer that normalises by each rank's own samples: no SyncBatchNorm, torch's or ours."""
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm | SynchronisedBatchNorm)


def set_counted(is_counted: bool) -> None:
    """Whether what this process runs from now on enters the statistics of synchronised layers, of whatever model.

    A rank without a sample in a micro-batch calls ``set_counted(False)`` before it runs its
    stand-in, which all layers then normalise and no statistics see, and ``set_counted(True)`` before
    its next micro-batch. It must hold until the backward has ended, where checkpoints run layers
    again. `SplitConfig.micro_batches` does all this, by `standing_in`.
    """
    _NOW.is_counted = is_counted


class _Now:
    is_counted = True


_NOW = _Now()  # a fact of what the loop is at, rather than of a layer: several models may be given the stand-in


@contextmanager
def standing_in(model: nn.Module | None) -> Iterator[None]:
    """Inside, the loop runs a stand-in: its sample enters the statistics of no BatchNorm layer.

    Synchronised layers normalise it by the samples of the other ranks. Those of `model` that are not
    take their running statistics for as long: of a single sample they would have no variance, and
    raise on this rank while the others wait for it.
    """
    norms = [module for module in modules_of(model) if isinstance(module, _BatchNorm)] if model is not None else []
    alone = [norm for norm in norms if norm.training and not isinstance(norm, SynchronisedBatchNorm)]
    set_counted(False)
    for norm in alone:
        norm.training = False
    try:
        yield
    finally:
        set_counted(True)
        for norm in alone:
            norm.training = True


def _spans_ranks(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _pool(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    whole: Tensor = apply(_OverRanks, part, group)
    # of a card the host would have to wait for it, in every layer: there a single value has variance 0
    if whole.device.type == "cpu" and whole.size(1):
        refuse_single_value(whole[2, 0].item(), "all ranks together")
    return whole


class _OverRanks(torch.autograd.Function):
    """The whole's statistics out of every rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        parts = part.new_empty((dist.get_world_size(group), *part.shape))
        dist.all_gather(list(parts), part.contiguous(), group=group)
        whole, shares = pooled(parts)
        rank = dist.get_rank(group)
        # its own rows alone, for there may be a thousand
        ctx.own = Shares(*(each[rank : rank + 1].clone() for each in shares))
        ctx.group = group
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0][:2].clone()
        dist.all_reduce(grad, group=ctx.group)
        gradients: Tensor = ctx.own.gradients(grad)
        return gradients[0], None
