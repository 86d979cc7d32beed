"""What one strategy saved, another one loads: ranks, one process, and the plain model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splittune import load_state_dict
from splittune.parallel import BalancedDataParallel
from tests.ranks.cases import batches_of, errors_of, loss_of, net_of
from tests.ranks.checkpoints import CASE, SIZES, adam_of, step
from tests.ranks.pool import Pool

TWO_BATCHES = batches_of(replace(CASE, sizes=(SIZES, SIZES)))


def in_one_process(net: nn.Module) -> nn.Module:
    return BalancedDataParallel(module=net, shard_sizes=(4, 2), device_ids=["cpu", "cpu"])


def plain(net: nn.Module) -> nn.Module:
    return net


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()


def trained(model: nn.Module) -> Any:
    named = model.named_parameters()
    return [], {name.removeprefix("module."): parameter.detach().clone() for name, parameter in named}


@pytest.fixture
def truth() -> Any:
    """Two steps on one device, without a checkpoint between them."""
    model = net_of(CASE)
    optimizer = adam_of(model)
    for batch in TWO_BATCHES:
        one_step(model, optimizer, batch)
    return trained(model)


@pytest.mark.parametrize("wrap", [in_one_process, plain])
def test_training_on_ranks_goes_on_elsewhere(
    pool: Pool, tmp_path: Path, truth: Any, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """Rank 0's checkpoint, model and optimizer, goes on in the wrapper of one process and in the plain model."""
    pool.run(step, TWO_BATCHES[0], None, tmp_path / "saved.pt", num_ranks=2)
    saved = torch.load(tmp_path / "saved.pt")
    model = wrap(net_of(replace(CASE, seed=9)))
    optimizer = adam_of(model)
    assert load_state_dict(model, saved["model"]).missing_keys == []
    optimizer.load_state_dict(saved["optimizer"])
    one_step(model, optimizer, TWO_BATCHES[1])
    assert max(errors_of(trained(model), truth)) <= 1e-12


@pytest.mark.parametrize("wrap", [in_one_process, plain])
def test_training_elsewhere_goes_on_on_ranks(
    pool: Pool, tmp_path: Path, truth: Any, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """Keys with and without ``module.`` load on every rank, and training ends where one device's does."""
    model = wrap(net_of(CASE))
    optimizer = adam_of(model)
    one_step(model, optimizer, TWO_BATCHES[0])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    for found in pool.run(step, TWO_BATCHES[1], tmp_path / "saved.pt", None, num_ranks=2):
        assert max(errors_of(found, truth)) <= 1e-12
