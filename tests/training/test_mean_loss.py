"""A loss that is a sum is told from a mean: by the same samples twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from splittune import autotune
from splittune.profiling.measurement import Measurement
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from splittune.training.mean_loss import describe_sum
from tests.training.job import make_model, step_of

GENERATOR = torch.Generator().manual_seed(3)
BATCH = (torch.randn(64, 4, generator=GENERATOR), torch.randn(64, 2, generator=GENERATOR))
Step = Callable[[nn.Module, Any], Tensor]


class WithLoss(nn.Module):
    """A model that computes its loss in each replica."""

    def __init__(self, reduction: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.net, self.dropout, self.reduction = make_model(), nn.Dropout(dropout), reduction

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(self.net(self.dropout(inputs)), targets, reduction=self.reduction)


def exponent_of(job: TrainingTask, *shard_sizes: int) -> int | None:
    split = BatchSplit(global_batch_size=sum(shard_sizes), accumulation_steps=1, shard_sizes=shard_sizes)
    return step_of(job, split).loss_exponent()


def by_output(reduction: str) -> TrainingTask:
    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(output, targets, reduction=reduction)

    return TrainingTask(make_model(), [BATCH], loss_fn=loss_fn)


def by_model(reduction: str, dropout: float = 0.0) -> TrainingTask:
    return TrainingTask(WithLoss(reduction, dropout), [BATCH], step_fn=lambda model, batch: model(*batch))


@given(
    sizes=st.lists(st.integers(4, 40), min_size=1, max_size=4),
    reduction=st.sampled_from(["mean", "sum"]),
    make=st.sampled_from([by_output, by_model]),
)
def test_a_sum_and_a_mean_are_told_apart_under_any_split(
    sizes: list[int], reduction: str, make: Callable[[str], TrainingTask]
) -> None:
    """In each replica or of the gathered output, whatever the split and beyond the loader's own batch."""
    exponent = exponent_of(make(reduction), *sizes)
    assert exponent == (reduction == "sum")
    assert (describe_sum(exponent) is None) == (reduction == "mean")


@pytest.mark.parametrize("sizes", [(8, 8), (0, 16), (32, 32, 32), (1, 3)])
def test_of_the_output_it_is_told_however_small_the_shards(sizes: tuple[int, ...]) -> None:
    assert exponent_of(by_output("mean"), *sizes) == 0
    assert exponent_of(by_output("sum"), *sizes) == 1


def test_dropout_is_taken_for_noise() -> None:
    torch.manual_seed(0)
    job = by_model("mean", dropout=0.5)
    assert [describe_sum(exponent_of(job, 8, 8)) for _ in range(50)] == [None] * 50


def test_fewer_than_four_samples_tell_nothing() -> None:
    assert exponent_of(by_output("sum"), 1, 2) is None
    assert describe_sum(None) is None


def runs_backward(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)
    loss.backward()
    return loss


def is_nothing(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)
    return 0 * loss


def is_infinite(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)
    return loss / 0


@pytest.mark.parametrize("step_fn", [runs_backward, is_nothing, is_infinite])
def test_what_cannot_be_told_is_not(step_fn: Step) -> None:
    assert exponent_of(TrainingTask(WithLoss("sum"), [BATCH], step_fn=step_fn), 8, 8) is None


def test_a_kernel_error_is_not_swallowed() -> None:
    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        exponent_of(TrainingTask(WithLoss("sum"), [BATCH], step_fn=step_fn), 8, 8)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_user_is_told_of_a_sum(reduction: str, caplog: pytest.LogCaptureFixture) -> None:
    job = by_output(reduction)
    with caplog.at_level(logging.WARNING, "splittune"):
        result = autotune(job.model, job.loader, loss_fn=job.loss_fn, devices="2xT4", max_trials=4, progress=False)
    told = [note for note in result.notes if "no mean" in note]
    assert len(told) == (reduction == "sum")
    assert [record.getMessage() for record in caplog.records if "no mean" in record.getMessage()] == told
    assert all(note in result.explanation for note in told)


def test_the_model_is_as_it_was_found() -> None:
    job = by_output("sum")
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    random = torch.get_rng_state()
    autotune(job.model, job.loader, loss_fn=job.loss_fn, devices="2xT4", max_trials=4, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_the_emitted_split_has_it_wherever_it_is_kept() -> None:
    job = by_output("sum")
    result = autotune(job.model, job.loader, loss_fn=job.loss_fn, devices="2xT4", max_trials=4, progress=False)
    assert result.best.loss_exponent == 1
    assert Measurement.from_dict(result.best.to_dict()) == result.best
