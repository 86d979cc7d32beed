"""Training of real models on real data for a few epochs, on one device and on ranks, by the loop of the README."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.jobs.workloads import digits_cnn
from splittune.config import SplitConfig
from splittune.demo import ByteGPT, StandardLibraryText
from splittune.split import BatchSplit
from tests.ranks.cases import config_of

NUM_EPOCHS = 3
SPLIT = BatchSplit(global_batch_size=24, accumulation_steps=3, shard_sizes=(1, 4, 3, 0))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and how its batch of 24 is split over four ranks."""

    build: Callable[[], tuple[nn.Module, Dataset[Any]]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    split: BatchSplit = SPLIT
    wrap_options: tuple[tuple[str, Any], ...] = ()

    def loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(
            dataset, batch_size=self.split.global_batch_size, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    @property
    def config(self) -> SplitConfig:
        return config_of(4, split=self.split)


def small_gpt() -> tuple[nn.Module, Dataset[Any]]:
    """100 windows of real text, so that the last batch of 24 has 4."""
    torch.manual_seed(0)
    model = ByteGPT(width=32, num_layers=1, num_heads=2, context=16)
    return model, Subset(StandardLibraryText(16), range(0, 4000, 40))


def of_bytes(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def digits() -> tuple[nn.Module, Dataset[Any]]:
    """A CNN with BatchNorm on 100 digits."""
    job = digits_cnn()
    return job.model, Subset(job.loader.dataset, range(100))


GPT = Job(build=small_gpt, loss_fn=of_bytes)
# In one micro-batch, as BatchNorm normalises on one device; no samples for the last rank.
DIGITS = Job(
    build=digits,
    loss_fn=F.cross_entropy,
    split=BatchSplit(global_batch_size=24, accumulation_steps=1, shard_sizes=(3, 11, 10, 0)),
    wrap_options=(("sync_batch_norm", True),),
)


def train_on_one_device(job: Job) -> tuple[dict[str, Tensor], list[float]]:
    """The state at the end, and the loss of every step."""
    model, dataset = job.build()
    loader = job.loader(dataset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(NUM_EPOCHS):
        for inputs, targets in loader:
            loss = job.loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
    return {name: value.clone() for name, value in model.state_dict().items()}, losses


def train_on_ranks(group: dist.ProcessGroup | None, job: Job) -> tuple[dict[str, Tensor], list[float]]:
    """The same on this rank; the losses are summed over the ranks."""
    model, dataset = job.build()
    wrapped = job.config.wrap(model, **dict(job.wrap_options))
    loader = job.config.shard(job.loader(dataset))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            total = torch.zeros(())
            for micro in job.config.micro_batches(batch, wrapped):
                inputs, targets = micro.batch
                loss = job.loss_fn(wrapped(inputs), targets.to(wrapped.output_device)) * micro.weight
                loss.backward()
                total += loss.detach() / 4
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            dist.all_reduce(total)
            losses.append(total.item())
    return {name: value.clone() for name, value in wrapped.unwrap().state_dict().items()}, losses
