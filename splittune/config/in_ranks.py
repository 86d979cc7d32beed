"""What a config does in a process group: this rank's wrapped model, and its part of the loader."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from splittune.cards import is_card
from splittune.config.data import ConfigData, Strategy
from splittune.config.other_devices import warn_of_other_devices
from splittune.config.schema import config_to_text
from splittune.errors import ConfigError
from splittune.hardware.resolve import resolve_hardware
from splittune.parallel.base import SplitModule
from splittune.parallel.modules import modules_of
from splittune.ranks.agreement import Fact, agree
from splittune.ranks.batch_norm import check_synchronisable, synchronised_batch_norm
from splittune.ranks.group import (
    check_backend,
    check_grouped,
    check_launched_alone,
    check_world_size,
    device_of_rank,
    is_grouped,
)
from splittune.ranks.loader import ShardedLoader
from splittune.ranks.module import DistributedSplit

if TYPE_CHECKING:
    from splittune.parallel.replica_loss import LossFunction, WeightFunction

_ON_LOADERS = (
    "Give every rank the same loader, of the whole data set in global batches: config.shard picks each rank's samples."
)
_ALONE = (
    "the model has BatchNorm, which will normalise by each rank's own samples: another training than one device's, and "
    "a rank that is left a single sample of a short last batch may raise. Use config.wrap(model, sync_batch_norm=True)."
)


def trains_by_rank(strategy: Strategy, num_ranks: int) -> bool:
    """Whether the ranks of a process group have to come together here: for "ddp", or to be told that it is not.

    Raises:
        ConfigError: "ddp" without a process group, or a process started as one of several without one.
    """
    if strategy == "ddp":
        check_grouped(num_ranks)
        return True
    check_launched_alone(strategy)
    return is_grouped() and dist.get_world_size() > 1


def wrap_rank(
    config: ConfigData,
    model: nn.Module,
    loss_fn: LossFunction | None,
    weight_fn: WeightFunction | None,
    *,
    sync_batch_norm: bool,
    devices: str | Sequence[str | int | torch.device] | None,
    ddp_options: Mapping[str, Any],
    timeout_s: float,
) -> DistributedSplit:
    """This rank's `DistributedSplit`, after all ranks have found that they mean the same; see `SplitConfig.wrap`."""
    group = ddp_options.get("process_group")

    def prepare() -> tuple[torch.device, list[Fact]]:
        _check_strategy(config, group)
        _refuse_wrapped(model)
        if sync_batch_norm:
            check_synchronisable(model)
        device = device_of_rank([each.torch_device for each in config.devices], devices, dist.get_rank(group))
        check_backend(device, group)
        losses = f"loss_fn {_is_given(loss_fn)}, weight_fn {_is_given(weight_fn)}"
        return device, [
            _fact_of(config),
            Fact(name="the model", value=signature_of(model), advice="Build the same model on every rank."),
            Fact(name="the loss", value=losses, advice="Call config.wrap alike on every rank."),
            Fact(name="sync_batch_norm", value=f"{sync_batch_norm}", advice="Call config.wrap alike on every rank."),
            Fact(name="ddp_options", value=_words_of(ddp_options), advice="Call config.wrap alike on every rank."),
        ]

    device = agree("config.wrap", prepare, group=group, timeout_s=timeout_s)
    if is_card(device):
        present = resolve_hardware([device])
        rank = dist.get_rank(group)
        warn_of_other_devices(config, present.devices, is_modelled=present.is_modelled, first=rank, stacklevel=4)
    if sync_batch_norm:
        synchronised_batch_norm(model, group)
    elif any(isinstance(module, _BatchNorm) and module.training for module in modules_of(model)):
        warnings.warn(_ALONE, UserWarning, stacklevel=3)
    return DistributedSplit(model, device=device, loss_fn=loss_fn, weight_fn=weight_fn, **ddp_options)


def shard_for_rank(config: ConfigData, loader: Any, *, seed: int, timeout_s: float) -> ShardedLoader:
    """This rank's `ShardedLoader`, after all ranks have found that they mean the same; see `SplitConfig.shard`."""

    def prepare() -> tuple[ShardedLoader, list[Fact]]:
        _check_strategy(config, None)
        sharded = ShardedLoader(
            loader, config.split, rank=dist.get_rank(), num_ranks=config.split.num_devices, seed=seed
        )
        return sharded, [
            _fact_of(config),
            *(Fact(name=name, value=value, advice=_ON_LOADERS) for name, value in sharded.facts().items()),
        ]

    return agree("config.shard", prepare, timeout_s=timeout_s)


def _check_strategy(config: ConfigData, group: dist.ProcessGroup | None) -> None:
    if config.strategy == "dp":
        raise ConfigError(
            f"this config says strategy='dp', one process for all {config.split.num_devices} devices, and this process "
            f"is one of {dist.get_world_size(group)} ranks. Train with a rank for each device, "
            'dataclasses.replace(config, strategy="ddp"), or start one process, without a process group.'
        )
    check_world_size(config.split.num_devices, group)


def _refuse_wrapped(model: nn.Module) -> None:
    wrappers: tuple[type, ...] = (nn.DataParallel, DistributedDataParallel, SplitModule)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody has sharded a module without it
    if fsdp is not None:
        wrappers += (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    found = next((module for module in modules_of(model) if isinstance(module, wrappers)), None)
    if found is not None:
        raise ConfigError(
            f"the model is wrapped already, in {type(found).__name__}: expected the plain module, which config.wrap "
            "wraps itself. Pass the module that was wrapped, model.module mostly."
        )


def _fact_of(config: ConfigData) -> Fact:
    return Fact(name="the config", value=config_to_text(config), advice="Load the same file on every rank.")


def signature_of(model: nn.Module) -> str:
    """A line for each parameter and buffer: its name, shape and dtype, for ranks to compare."""
    learned = [
        f"{name} {tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in model.named_parameters()
    ]
    buffers = [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    return "\n".join([*learned, *buffers])


def _is_given(function: object) -> str:
    return "not given" if function is None else "given"


def _words_of(options: Mapping[str, Any]) -> str:
    plain = bool | int | float | str | None
    words = {name: value if isinstance(value, plain) else type(value).__name__ for name, value in options.items()}
    return ", ".join(f"{name}={value}" for name, value in sorted(words.items())) or "none"
