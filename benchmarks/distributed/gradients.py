"""Gradients of drawn splits on ranks beside those of the same batches on one device.

A case is a world size, a split of it (shares of 0 among them), a data set whose last batch is short, float32 or
float64, and DistributedDataParallel's options. Two epochs go through `config.wrap`, `config.shard` and
`config.micro_batches`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.distributed.jobs import config_for, gradient_of, loader_of, net
from splittune import BatchSplit

NUM_EPOCHS = 2
LARGEST_BATCH = 40


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    split: BatchSplit
    num_samples: int
    float64: bool
    options: tuple[tuple[str, Any], ...]
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.float64 else torch.float32


def draw_cases(num_ranks: int, num_cases: int, seed: int) -> list[Case]:
    """The same on every rank."""
    draws = random.Random(f"{seed} {num_ranks}")
    return [_draw(num_ranks, draws) for _ in range(num_cases)]


def _draw(num_ranks: int, draws: random.Random) -> Case:
    batch_size = draws.randint(1, LARGEST_BATCH)
    num_steps = draws.randint(1, min(4, batch_size))
    micro_batch_size = -(-batch_size // num_steps)
    cuts = sorted(draws.randint(0, micro_batch_size) for _ in range(num_ranks - 1))
    shares = [end - start for start, end in zip([0, *cuts], [*cuts, micro_batch_size], strict=True)]
    options = {"gradient_as_bucket_view": draws.random() < 0.5, "static_graph": draws.random() < 0.25}
    return Case(
        split=BatchSplit(global_batch_size=batch_size, accumulation_steps=num_steps, shard_sizes=tuple(shares)),
        num_samples=draws.randint(batch_size, 3 * batch_size),
        float64=draws.random() < 0.5,
        options=tuple(options.items()),
        seed=draws.randint(0, 10**6),
    )


def judge_on_rank(cases: list[Case]) -> list[float]:
    """The largest error of each case on this rank: difference over the gradient's largest entry, at every step."""
    return [max(_errors(case), default=0.0) for case in cases]


def _errors(case: Case) -> Iterator[float]:
    truth = list(_on_one_device(case))
    found = list(_on_this_rank(case))
    if len(found) != len(truth):
        yield float("inf")
    for mine, true in zip(found, truth, strict=False):
        error = float((mine - true).abs().max() / true.abs().max())
        yield error if error == error else float("inf")  # noqa: PLR0124  not a number is as wrong as can be


def _on_one_device(case: Case) -> Iterator[Tensor]:
    """The gradients step by step; parameters stay, so that no error hides in or grows out of another one."""
    model, loss_fn = net(case.seed, case.dtype), nn.CrossEntropyLoss()
    loader = loader_of(case.num_samples, case.split.global_batch_size, case.seed, case.dtype)
    for _ in range(NUM_EPOCHS):
        for inputs, targets in loader:
            loss_fn(model(inputs), targets).backward()
            yield gradient_of(model)
            model.zero_grad()


def _on_this_rank(case: Case) -> Iterator[Tensor]:
    config, loss_fn = config_for(case.split), nn.CrossEntropyLoss()
    model = config.wrap(net(case.seed, case.dtype), ddp_options=dict(case.options))
    loader = config.shard(loader_of(case.num_samples, case.split.global_batch_size, case.seed, case.dtype))
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            for micro in config.micro_batches(batch, model):
                inputs, targets = micro.batch
                (loss_fn(model(inputs), targets) * micro.weight).backward()
            yield gradient_of(model).clone()  # with bucket views the next step writes there
            model.zero_grad()
