"""The jobs that benchmarks and tests share are real, repeatable, and leave torch's random numbers alone."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.jobs.workloads import Workload, digits, digits_cnn, mlp


def train_one_epoch(workload: Workload) -> list[float]:
    """Train in place; returns the loss of every step."""
    optimizer = workload.optimizer(workload.model.parameters())
    losses = []
    for inputs, targets in workload.loader:
        loss = workload.loss_fn(workload.model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def test_digits_cnn_learns_to_read_held_out_digits() -> None:
    """Two passes over the training digits read over 90 % of the held-out ones."""
    workload = digits_cnn()
    for _ in range(2):
        train_one_epoch(workload)
    inputs, targets = digits(held_out=True).tensors
    workload.model.eval()
    with torch.no_grad():
        accuracy = (workload.model(inputs).argmax(dim=1) == targets).double().mean().item()
    assert accuracy > 0.90


def test_digits_have_the_promised_shapes_and_types() -> None:
    """Batches are (N, 1, 8, 8) float32 from 0 to 1 with integer targets, and the last one is short."""
    batches = list(digits_cnn(batch_size=64).loader)
    inputs, targets = batches[0]
    assert (inputs.shape, inputs.dtype) == ((64, 1, 8, 8), torch.float32)
    assert (targets.shape, targets.dtype) == ((64,), torch.int64)
    assert (inputs.min().item(), inputs.max().item()) == (0.0, 1.0)
    assert [len(batch_targets) for _, batch_targets in batches] == [64] * 22 + [29]


def test_training_and_held_out_digits_are_all_of_them_and_disjoint() -> None:
    """Together the two sets are the 1,797 scans that scikit-learn ships, each in one set."""
    from sklearn.datasets import load_digits

    together = torch.cat([digits(held_out=side).tensors[0] for side in (True, False)])
    everything = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16
    rows = {tuple(row.tolist()) for row in together.flatten(1)}
    assert len(together) == len(everything) == 1797
    assert rows == {tuple(row.tolist()) for row in everything.flatten(1)}


def test_digits_cnn_has_batch_norm() -> None:
    """It is the workload whose statistics depend on the split."""
    assert any(isinstance(module, nn.BatchNorm2d) for module in digits_cnn().model.modules())


def test_mlp_learns() -> None:
    """A few passes cut the loss to less than half."""
    workload = mlp()
    first = sum(train_one_epoch(workload))
    for _ in range(20):
        last = sum(train_one_epoch(workload))
    assert last < first / 2


def test_mlp_takes_the_asked_type_and_shapes() -> None:
    """float64 makes model, inputs and targets float64."""
    workload = mlp(batch_size=5, num_samples=11, num_features=3, dtype=torch.float64)
    assert [tuple(inputs.shape) for inputs, _ in workload.loader] == [(5, 3), (5, 3), (1, 3)]
    inputs, targets = next(iter(workload.loader))
    assert inputs.dtype == targets.dtype == workload.model(inputs).dtype == torch.float64
    assert targets.shape == workload.model(inputs).shape


@pytest.mark.parametrize("make", [digits_cnn, mlp])
def test_same_seed_same_job(make: Callable[..., Workload]) -> None:
    """The same seed gives the same weights and batches, and so the same losses; another seed gives others."""
    assert train_one_epoch(make(seed=3)) == train_one_epoch(make(seed=3))
    assert train_one_epoch(make(seed=3)) != train_one_epoch(make(seed=4))


@pytest.mark.parametrize("make", [digits_cnn, mlp])
def test_building_and_loading_draw_nothing_from_torch(make: Callable[..., Workload]) -> None:
    """torch's random numbers are the same after building a job and iterating its loader."""
    before = torch.get_rng_state()
    for _ in make().loader:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_missing_scikit_learn_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn the digits say how to get it."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        digits(held_out=True)
