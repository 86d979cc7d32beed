"""A rank that is slower by a known factor: steps under even shares and under shares by speed, in one run.

Every rank sleeps in its forward for as long as its samples take, the slow one that many times as long: cores that ranks
share do not blur it. What the step takes besides (the model, gloo, the loader) is real.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.distributed.jobs import config_for, loader_of, net
from splittune import BatchSplit

# A step of a fraction of a second, of which the ranks' own work is a few percent. A choice.
SAMPLE_TIME_S = 0.005
GLOBAL_BATCH_SIZE = 64
NUM_STEPS = 6
# Both splits in turn, so that what else the machine does meets both.
NUM_ROUNDS = 3


class Slowed(nn.Module):
    """Takes a known time for each sample, besides its own."""

    def __init__(self, model: nn.Module, sample_time_s: float) -> None:
        super().__init__()
        self.model, self.sample_time_s = model, sample_time_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(len(x) * self.sample_time_s)
        out: Tensor = self.model(x)
        return out


def shares_by_speed(sample_times_s: Sequence[float], num_samples: int) -> tuple[int, ...]:
    """The shares whose slowest rank ends first: each sample goes where it would be done earliest.

    Worked: 64 samples over ranks of which the first takes 3 times as long give 6 + 20 + 19 + 19.
    """
    shares = [0] * len(sample_times_s)
    for _ in range(num_samples):
        ends = [(share + 1) * each for share, each in zip(shares, sample_times_s, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def slowest_s(shares: Sequence[int], sample_times_s: Sequence[float]) -> float:
    """The time of a step in theory: that of the rank that takes longest, and nothing besides."""
    return max(share * each for share, each in zip(shares, sample_times_s, strict=True))


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Even shares and shares by speed where the first of the ranks is `factor` times as slow as the others."""

    factor: float
    num_ranks: int

    @property
    def sample_times_s(self) -> list[float]:
        return [SAMPLE_TIME_S * (self.factor if rank == 0 else 1) for rank in range(self.num_ranks)]

    @property
    def splits(self) -> dict[str, tuple[int, ...]]:
        even = (GLOBAL_BATCH_SIZE // self.num_ranks,) * self.num_ranks
        return {"even": even, "by speed": shares_by_speed(self.sample_times_s, GLOBAL_BATCH_SIZE)}


def measure_on_rank(contests: Sequence[Contest], seed: int) -> list[dict[str, float]]:
    """The median seconds of a step under either split of each contest, as this rank sees it."""
    found: list[dict[str, list[float]]] = [{name: [] for name in contest.splits} for contest in contests]
    for _ in range(NUM_ROUNDS):
        for contest, times_s in zip(contests, found, strict=True):
            for name, shares in contest.splits.items():
                times_s[name] += _steps_s(shares, contest.sample_times_s[dist.get_rank()], seed)
    return [{name: statistics.median(times) for name, times in each.items()} for each in found]


def _steps_s(shares: tuple[int, ...], sample_time_s: float, seed: int) -> list[float]:
    config = config_for(BatchSplit(global_batch_size=sum(shares), accumulation_steps=1, shard_sizes=shares))
    model = config.wrap(Slowed(net(seed, torch.float32), sample_time_s))
    loader = config.shard(loader_of(sum(shares) * (NUM_STEPS + 1), sum(shares), seed, torch.float32))
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    times = []
    start = time.perf_counter()
    for batch in loader:
        for micro in config.micro_batches(batch, model):
            inputs, targets = micro.batch
            (loss_fn(model(inputs), targets) * micro.weight).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    return times[1:]  # in the first the buckets are made
