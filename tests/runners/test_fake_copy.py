"""A copy without values keeps shapes, ties and the optimizer's state, and the job is only read."""

from __future__ import annotations

import torch
from torch import nn

from splittune.fakes import FakeTensor, FakeTensorMode
from splittune.runners.fake_copy import shape_of, without_values
from splittune.training import TrainingTask


class Tied(nn.Module):
    """Its head is its embedding; a table is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))
        self.table = torch.arange(4.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens) * self.scale + self.table)


def trained() -> TrainingTask:
    """After one step, so that Adam has a state."""
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(2, dtype=torch.long)).sum().backward()
    optimizer.step()
    return TrainingTask(model, [], loss_fn=nn.CrossEntropyLoss(torch.ones(16)), optimizer=optimizer)


def test_ties_and_state_are_kept() -> None:
    """One parameter under both names, with Adam's moments, in their sizes, and its count of steps; no gradients."""
    task, mode = trained(), FakeTensorMode(allow_non_fake_inputs=True)
    copied = without_values(task, mode)
    assert copied.model.head.weight is copied.model.embed.weight
    assert isinstance(copied.model.head.weight, nn.Parameter)
    (group,) = copied.optimizer.param_groups
    assert group["params"] == [copied.model.embed.weight]
    state = copied.optimizer.state[copied.model.embed.weight]
    tensors = [*copied.model.state_dict().values(), copied.model.table, copied.loss_fn.weight]
    tensors += [state["exp_avg"], state["exp_avg_sq"]]
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
    assert state["exp_avg"].shape == (16, 4)
    assert state["step"].item() == 1
    assert copied.model.embed.weight.grad is None


def test_the_job_is_only_read() -> None:
    """Weights, gradients and Adam's state are bit by bit what and where they were."""
    task = trained()
    weight = task.model.embed.weight
    before = [tensor.clone() for tensor in (weight, weight.grad, task.optimizer.state[weight]["exp_avg"])]
    without_values(task, FakeTensorMode(allow_non_fake_inputs=True))
    after = [weight, weight.grad, task.optimizer.state[weight]["exp_avg"]]
    assert task.model.embed.weight is weight
    assert all(torch.equal(*each) for each in zip(before, after, strict=True))
    assert not any(isinstance(tensor, FakeTensor) for tensor in after)


def test_a_shape_has_the_tensors_size_strides_and_kind() -> None:
    """A transposed matrix that wants a gradient stays one."""
    tensor = torch.zeros(3, 5, dtype=torch.float64).t().requires_grad_()
    fake = shape_of(tensor, FakeTensorMode(allow_non_fake_inputs=True))
    assert (fake.shape, fake.stride(), fake.dtype, fake.requires_grad) == ((5, 3), (1, 5), torch.float64, True)
