"""One optimizer step of a job: its gradient, its sizes, its update, and the steps that a gradient scaler skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.nn import functional

from splittune.errors import ConfigError
from splittune.split import BatchSplit
from splittune.training import TrainingTask, read_batches
from splittune.training.skipped import MAX_SKIPPED_IN_A_ROW
from tests.training.job import BATCH, make_model, step_of, task, two_steps


@given(global_batch_size=st.integers(1, 13), data=st.data())
def test_a_whole_step_has_the_gradient_of_the_whole_batch(global_batch_size: int, data: st.DataObject) -> None:
    """However the batch is cut, a step's gradient is that of all its samples at once, and each is run once."""
    k = data.draw(st.integers(1, global_batch_size), label="accumulation_steps")
    split = BatchSplit.even(global_batch_size=global_batch_size, accumulation_steps=k, num_devices=2)
    sizes, grads = [], []

    class Sgd(optim.SGD):
        def step(self, closure: Any = None) -> None:
            grads.extend(parameter.grad.clone() for parameter in model.parameters())

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(output))
        return functional.mse_loss(output, targets)

    model = make_model().double()
    x, y = (tensor.double() for tensor in BATCH)
    job = TrainingTask(model, [(x, y)], loss_fn=loss_fn, optimizer=Sgd(model.parameters(), lr=0.1))
    step_of(job, split).whole()
    # every micro-batch starts with the same samples
    parts = [read_batches([(x, y)]).micro_batch(size) for size in split.micro_batch_sizes]
    whole = [torch.cat(column) for column in zip(*parts, strict=True)]
    expected = torch.autograd.grad(functional.mse_loss(model(whole[0]), whole[1]), list(model.parameters()))
    assert tuple(sizes) == split.micro_batch_sizes
    torch.testing.assert_close(grads, list(expected))


def test_micro_steps_are_of_the_largest_size_unless_told() -> None:
    """A micro-step alone is the largest, since that is the one whose time and memory count."""
    sizes = []

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(output))
        return functional.mse_loss(output, targets)

    job = task(loss_fn=loss_fn)
    step = step_of(job, two_steps(5))
    step.micro_step()
    step.micro_step(2)
    assert sizes == [3, 2]


def test_an_update_trains_and_gives_the_gradients_back() -> None:
    """After an update the parameters have moved and hold no gradient."""
    job = task(optimizer=lambda parameters: optim.SGD(parameters, lr=0.1))
    before = [parameter.clone() for parameter in job.model.parameters()]
    step = step_of(job, two_steps())
    step.micro_step()
    step.update()
    for parameter, values in zip(job.model.parameters(), before, strict=True):
        assert not torch.equal(parameter, values)
        assert parameter.grad is None


# the gradient scaler


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def scaler(scale: float = 2.0**16, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def test_a_scaled_step_is_the_step_unscaled() -> None:
    """The loss is scaled, gradients are unscaled before the update, and the parameters are those of a plain step."""
    moved = []
    for grad_scaler in (None, scaler()):
        torch.manual_seed(0)
        job = task(optimizer=sgd, grad_scaler=grad_scaler)
        step = step_of(job, two_steps())
        step.whole()
        assert step.took_effect()
        assert all(parameter.grad is None for parameter in job.model.parameters())
        moved.append([parameter.detach().clone() for parameter in job.model.parameters()])
    torch.testing.assert_close(moved[0], moved[1])


def test_a_scaler_that_is_disabled_changes_nothing() -> None:
    """Torch disables a scaler whose device is not there: the step is a plain one, and counts."""
    job = task(optimizer=sgd, grad_scaler=scaler(enabled=False))
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    step = step_of(job, two_steps())
    step.whole()
    assert step.took_effect()
    assert not torch.equal(before[0], next(job.model.parameters()))


class Overflows(nn.Module):
    """Its gradients are not finite in the backward passes of the first `num` losses that it sees scaled."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.left, self.linear = [num], nn.Linear(4, 2)  # a list: replicas share it

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        if torch.is_grad_enabled() and self.training:
            output.register_hook(self._spoil)
        return output

    def _spoil(self, grad: Tensor) -> Tensor:
        self.left[0] -= 1
        return grad * float("inf") if self.left[0] >= 0 else grad


def test_a_step_that_was_skipped_is_noticed() -> None:
    """Where gradients are not finite nothing is updated, the scale is halved, and the step says so;
    the next one counts."""
    model, grad_scaler = Overflows(2), scaler(8.0)
    job = task(model=model, optimizer=sgd, grad_scaler=grad_scaler)
    step, before = step_of(job, BatchSplit(global_batch_size=6, accumulation_steps=1, shard_sizes=(0, 6))), []
    for took_effect in (False, False, True):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step.whole()
        assert step.took_effect() is took_effect
        assert torch.equal(before[0], next(model.parameters())) is not took_effect
    assert step.num_skipped == 2
    assert grad_scaler.get_scale() == 2.0


def test_skipping_without_end_is_refused() -> None:
    """A model whose gradients are finite at no scale is refused after 40 halvings, and told what to do."""
    job = task(model=Overflows(1000), optimizer=sgd, grad_scaler=scaler())
    step = step_of(job, BatchSplit(global_batch_size=6, accumulation_steps=1, shard_sizes=(0, 6)))
    for _ in range(MAX_SKIPPED_IN_A_ROW):
        step.whole()
        assert not step.took_effect()
    step.whole()
    with pytest.raises(
        ConfigError, match=r"skipped 41 steps in a row, and its scale is 2\.98.*bfloat16, which needs no"
    ):
        step.took_effect()


def test_somebody_may_look_between_forward_and_backward() -> None:
    """Once in every micro-step, while no gradient of it is there."""
    job = task()
    step = step_of(job, two_steps())
    seen: list[bool] = []
    step.before_backward = lambda: seen.append(any(p.grad is not None for p in job.model.parameters()))
    step.micro_step()
    assert seen == [False]
    step.whole()
    assert len(seen) == 3
