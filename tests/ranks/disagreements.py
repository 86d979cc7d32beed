"""What ranks are given in the tests of what they must have alike; all of it runs in the ranks' processes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from splittune.parallel import BalancedDataParallel
from splittune.ranks import agreement
from splittune.split import BatchSplit
from tests.ranks.cases import config_of
from tests.ranks.pool import GROUP_TIMEOUT_S

MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(3, 4),
    "wider": lambda: nn.Linear(3, 5),
    "frozen": lambda: nn.Linear(3, 4).requires_grad_(False),
    "DataParallel": lambda: nn.DataParallel(nn.Linear(3, 4)),
    "DistributedDataParallel": lambda: DistributedDataParallel(nn.Linear(3, 4)),
    "BalancedDataParallel": lambda: BalancedDataParallel(1, nn.Linear(3, 4), ["cpu"]),
    "FSDPLinear": lambda: fully_shard(nn.Linear(3, 4)),
    "inside": lambda: nn.Sequential(nn.DataParallel(nn.Linear(3, 4))),
}


def wrap(
    group: dist.ProcessGroup,
    num_ranks: int,
    *,
    model: str = "plain",
    shards: int | None = None,
    ddp_options: dict[str, Any] | None = None,
    timeout_s: float = 30.0,
    wrap_options: dict[str, Any] | None = None,
    **fields: Any,
) -> str:
    """The type of what ``config.wrap`` gives."""
    options = {"process_group": group, **(ddp_options or {})}
    config = config_of(shards or num_ranks, **fields)
    wrapped = config.wrap(MODELS[model](), ddp_options=options, timeout_s=timeout_s, **(wrap_options or {}))
    return type(wrapped).__name__


def wrap_in_new_group(
    _: dist.ProcessGroup | None, num_ranks: int, backend: str | None, keywords: dict[str, Any] | None
) -> str:
    """All four ranks make a group of the first `num_ranks`, for where somebody stays away the count of meetings is off.

    Without `keywords` this rank makes it and goes away.
    """
    group = dist.new_group(list(range(num_ranks)), backend=backend, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    return "did not come" if keywords is None else wrap(group, num_ranks, **keywords)


def shard(_: dist.ProcessGroup | None, keywords: dict[str, Any]) -> str:
    """How many batches ``config.shard`` gives; of all four ranks, for there is one default group."""
    keywords = {"samples": 96, "batch_size": 48, "seed": None, "drawn_by": 0, "can_be_sharded": True, **keywords}
    samples, batch_size, seed = keywords.pop("samples"), keywords.pop("batch_size"), keywords.pop("seed")
    generator = torch.Generator().manual_seed(keywords.pop("drawn_by"))
    data = TensorDataset(torch.arange(samples))
    loader: Any = DataLoader(data, batch_size=batch_size, shuffle=True, generator=generator)
    if not keywords.pop("can_be_sharded"):
        loader = [torch.zeros(3)]
    return str(len(config_of(4, **keywords).shard(loader, seed=seed, timeout_s=30.0)))


def wrap_or_shard(group: dist.ProcessGroup | None, is_wrapping: bool) -> str:
    """Ranks that are at different places of the script."""
    config = config_of(4)
    return str(config.wrap(nn.Linear(3, 4)) if is_wrapping else config.shard(DataLoader(range(96), batch_size=48)))


def sum_of_ranks(group: dist.ProcessGroup | None) -> float:
    """Whether ranks can still work together."""
    total = torch.tensor(float(dist.get_rank(group)))
    dist.all_reduce(total, group=group)
    return total.item()


def look_ahead(_: dist.ProcessGroup | None, is_looking: bool) -> str:
    """A step, before which this rank has looked at a batch or not."""
    config = config_of(4)
    data = TensorDataset(torch.randn(96, 3), torch.randn(96, 4))
    loader, model = config.shard(DataLoader(data, batch_size=48)), config.wrap(nn.Linear(3, 4), timeout_s=30.0)
    if is_looking:
        next(iter(loader))
    for micro in config.micro_batches(next(iter(loader)), model):
        inputs, targets = micro.batch
        (nn.functional.mse_loss(model(inputs), targets) * micro.weight).backward()
    return "trained"


def evaluate_alone(_: dist.ProcessGroup | None, is_alone: bool) -> float:
    """The mean output of a model that has buffers, in evaluation; the other ranks do not come."""
    model = config_of(4).wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), sync_batch_norm=True, timeout_s=30.0)
    model.eval()
    with torch.no_grad():
        return float(model(torch.ones(5, 3)).isfinite().float().mean()) if is_alone else 1.0


def count_tokens(_: dist.ProcessGroup | None, is_failing: bool) -> str:
    """A step whose weight_fn fails on this rank or not."""

    def count(targets: torch.Tensor) -> int:
        if is_failing:
            raise LookupError("no padding id")
        return targets.numel()

    config = config_of(4)
    data = TensorDataset(torch.randn(96, 3), torch.randn(96, 4))
    model = config.wrap(nn.Linear(3, 4), nn.functional.mse_loss, weight_fn=count, timeout_s=30.0)
    for micro in config.micro_batches(next(iter(config.shard(DataLoader(data, batch_size=48)))), model):
        (model(*micro.batch) * micro.weight).backward()
    return "trained"


def end_on_two_samples(_: dist.ProcessGroup | None) -> float:
    """The loss of a last batch of 2 samples, whose model has BatchNorm over each rank's own."""
    split = BatchSplit(global_batch_size=16, accumulation_steps=1, shard_sizes=(4, 4, 4, 4))
    config, data = config_of(4, split=split), TensorDataset(torch.randn(18, 3), torch.randn(18, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of BatchNorm by itself, which this is about
        model = config.wrap(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), timeout_s=30.0)
    loss = torch.zeros(())
    for batch in config.shard(DataLoader(data, batch_size=16)):
        for micro in config.micro_batches(batch, model):
            inputs, targets = micro.batch
            loss = nn.functional.mse_loss(model(inputs), targets) * micro.weight
            loss.backward()
    return model.sum_over_ranks(loss.item()) / 4


def come_late(_: dist.ProcessGroup | None, is_late: bool) -> list[str]:
    """What this rank logs until all have come; a late one comes when another has said that it waits."""
    said: list[str] = []
    store = PrefixStore("come late", agreement.store_of(None))

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            store.set("said", "")

    if is_late:
        store.wait(["said"], timedelta(seconds=GROUP_TIMEOUT_S))
    logger, handler, before = agreement.logger, Keep(), (agreement.logger.level, agreement._LONG_S)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    agreement._LONG_S = 0.05
    try:
        agreement.agree("config.wrap", lambda: (None, []), timeout_s=GROUP_TIMEOUT_S)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        agreement._LONG_S = before[1]
    return said
