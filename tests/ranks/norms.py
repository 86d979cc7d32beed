"""A step of a model with BatchNorm on ranks with any shares, beside the same step on one device."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from splittune.errors import ConfigError
from splittune.ranks.batch_norm import set_counted, synchronised_batch_norm
from tests.parallel.models import gradients, loss_of
from tests.parallel.normed import images, make, one_device, statistics_of
from tests.ranks.cases import config_of, share_of


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """``sizes[micro_batch][rank]`` samples of one of the models of `tests.parallel.normed`."""

    name: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float64
    memory_format: torch.memory_format = torch.contiguous_format
    options: tuple[tuple[str, object], ...] = ()
    """DistributedDataParallel's."""

    @property
    def micro_batch_sizes(self) -> list[int]:
        return [sum(each) for each in self.sizes]


def model_and_batch(case: NormCase) -> tuple[nn.Module, Tensor]:
    model = make(case.name, case.dtype, case.memory_format)
    batch = images(sum(case.micro_batch_sizes), case.dtype).contiguous(memory_format=case.memory_format)
    return model, batch.requires_grad_()


def expected_of(case: NormCase) -> dict[str, Tensor]:
    return one_device(*model_and_batch(case), case.micro_batch_sizes)


def on_ranks(group: dist.ProcessGroup | None, case: NormCase) -> dict[str, Tensor]:
    """What this rank has after the step: outputs and the inputs' gradient of its own samples, all of the rest."""
    model, batch = model_and_batch(case)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    options = {**dict(case.options), "process_group": group}
    wrapped = DistributedDataParallel(synchronised_batch_norm(model, group), **options)
    outputs, own, start = [], [], 0
    for number, sizes in enumerate(case.sizes):
        first = start + sum(sizes[:rank])
        mine = list(range(first, first + sizes[rank]))
        set_counted(bool(mine))
        wrapped.require_backward_grad_sync = number == len(case.sizes) - 1
        output = wrapped(batch[mine or [0]])  # one sample stands in where there is none
        loss = loss_of(output) * (len(mine) * ranks / len(batch))
        loss.backward()
        outputs.append(output.detach()[: len(mine)])
        own += mine
        start += sum(sizes)
    set_counted(True)
    state = {
        f"gradient of {name.removeprefix('module.')}": parameter.grad
        for name, parameter in wrapped.named_parameters()
        if parameter.grad is not None
    }
    assert batch.grad is not None
    inputs = batch.grad / ranks  # the ranks' losses add up to so many times that of the batch
    return {
        **state,
        **statistics_of(model),
        "own": torch.tensor(own, dtype=torch.long),
        "outputs": torch.cat(outputs),
        "gradient of the inputs": inputs,
    }


def by_config(group: dist.ProcessGroup | None, case: NormCase, names_model: bool) -> dict[str, Tensor]:
    """Gradients and statistics on this rank, of the loop that every user writes."""
    model, batch = model_and_batch(case)
    sizes = tuple(zip(*case.sizes, strict=True))
    config = config_of(len(sizes))
    options = {} if group is None else {"process_group": group}
    wrapped = config.wrap(model, sync_batch_norm=True, ddp_options=options)
    share = share_of((batch.detach(), torch.arange(len(batch))), sizes, dist.get_rank(group))
    for micro in config.micro_batches(share, wrapped if names_model else None):
        (loss_of(wrapped(micro.batch[0])) * micro.weight).backward()
    grads = {f"gradient of {name}": grad for name, grad in gradients(wrapped).items() if grad is not None}
    return {**grads, **statistics_of(model)}


def in_half_precision(group: dist.ProcessGroup | None, sizes: tuple[int, ...]) -> tuple[dict[str, Tensor], ...]:
    """This rank's statistics after a forward and backward in bfloat16, and one device's of the whole batch."""
    model, batch = make("2d", torch.float32), images(sum(sizes), torch.float32)
    one, rank = copy.deepcopy(model), dist.get_rank(group)
    start = sum(sizes[:rank])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one(batch)
        output = synchronised_batch_norm(model, group)(batch[start : start + sizes[rank]])
    loss_of(output.float()).backward()
    return statistics_of(model), statistics_of(one)


def of_one_value(group: dist.ProcessGroup | None) -> str:
    """What a layer says of a single value a channel in all ranks; the others run a stand-in."""
    layer = synchronised_batch_norm(nn.BatchNorm1d(2), group)
    set_counted(dist.get_rank(group) == 1)
    try:
        layer(torch.ones(1, 2))
    except ValueError as error:
        return str(error)
    finally:
        set_counted(True)
    return ""


def evaluated(group: dist.ProcessGroup | None) -> bool:
    """Rank 0 evaluates alone: whether it is done, for other ranks it would wait for ever."""
    layer = synchronised_batch_norm(nn.BatchNorm1d(2), group).eval()
    if dist.get_rank(group) == 0:
        layer(torch.ones(3, 2))
    return True


def of_nothing(group: dist.ProcessGroup | None) -> Tensor:
    """The running mean after a batch of 0 samples on every rank but the last, which has ones."""
    layer = synchronised_batch_norm(nn.BatchNorm1d(2, momentum=1.0), group)
    is_last = dist.get_rank(group) == dist.get_world_size(group) - 1
    x = torch.ones(4 if is_last else 0, 2, requires_grad=True)
    layer(x * 3).sum().backward()
    assert layer.running_mean is not None
    return layer.running_mean


class Own(nn.BatchNorm2d):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def refused(_group: dist.ProcessGroup | None) -> str:
    """What `config.wrap` says of a layer with a forward of its own."""
    try:
        config_of(dist.get_world_size()).wrap(nn.Sequential(Own(2)), sync_batch_norm=True)
    except ConfigError as error:
        return str(error)
    return ""


def unsynchronised(group: dist.ProcessGroup | None) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, bool]:
    """All samples on rank 0: gradients there and of one device, the running mean, and whether the layer trains on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    one, batch = copy.deepcopy(model), torch.randn(5, 3, dtype=torch.float64)
    loss_of(one(batch)).backward()
    sizes = ((5,), *((0,) for _ in range(dist.get_world_size(group) - 1)))
    config = config_of(len(sizes))
    wrapped = config.wrap(model)
    share = share_of((batch, torch.arange(5)), sizes, dist.get_rank(group))
    for micro in config.micro_batches(share, wrapped):
        (loss_of(wrapped(micro.batch[0])) * micro.weight).backward()
    grads = [{name: grad for name, grad in gradients(each).items() if grad is not None} for each in (wrapped, one)]
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    return grads[0], grads[1], norm.running_mean, norm.training
