"""BatchNorm on several cards: a short batch trains wherever one device would train on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everybody writes it

from splittune.parallel import BalancedDataParallel
from tests.parallel.models import Call


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize("shards", [(8, 8, 8, 8), (4, 9, 9, 10), (3, 29), (0, 16, 16)])
@pytest.mark.parametrize("engine", ["window", "torch"])
def test_every_short_batch_of_two_or_more_trains(shards: tuple[int, ...], engine: str) -> None:
    """The loader's last batch may have any size from 2 on; no card is left with a single sample of it."""
    model = BalancedDataParallel(module=normed(), shard_sizes=shards, device_ids=["cpu"] * len(shards), engine=engine)
    for size in range(2, sum(shards) + 1):
        F.cross_entropy(model(torch.randn(size, 8)), torch.randint(3, (size,))).backward()


@pytest.mark.parametrize("last", range(2, 16))
def test_with_gpu0s_share_too(last: int) -> None:
    """Where GPU 0's share alone is given, a batch that is shorter than the first trains as well."""
    model = BalancedDataParallel(4, normed(), ["cpu"] * 3)
    for size in (16, last):
        model(torch.randn(size, 8)).sum().backward()


@pytest.mark.parametrize("module", [normed().eval(), nn.Linear(8, 3)], ids=["eval", "without"])
def test_nobody_else_gives_up_a_card(module: nn.Module) -> None:
    """BatchNorm that uses its running statistics, and models without it, spread a short batch over all cards."""
    model = BalancedDataParallel(module=module, shard_sizes=(4, 4, 4), device_ids=["cpu"] * 3)
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    model(torch.randn(3, 8))
    assert seen == [1, 1, 1]


def test_where_nothing_helps_torch_says_why() -> None:
    """A single sample has no variance on any card: torch's own message, with the replica named."""
    model = BalancedDataParallel(module=normed(), shard_sizes=(4, 4), device_ids=["cpu"] * 2)
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel.*a shard of 1 samples"):
        model(torch.randn(1, 8))
    assert BalancedDataParallel(module=Call(lambda _, x: x), shard_sizes=(4, 4), device_ids=["cpu"] * 2)(
        torch.randn(1, 8)
    ).shape == (1, 8)
