"""Small jobs, each of which gives a trial something else to look after."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from splittune.demo import byte_gpt
from splittune.training import TrainingTask


def vectors(num_samples: int = 16) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(num_samples, 6), torch.randint(3, (num_samples,)))]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def with_instance() -> TrainingTask:
    model = mlp()
    return TrainingTask(model, vectors(), optimizer=torch.optim.Adam(model.parameters(), weight_decay=0.1))


def with_state() -> TrainingTask:
    """Adam has done a step."""
    task = with_instance()
    inputs, targets = task.loader[0]
    functional.cross_entropy(task.model(inputs), targets).backward()
    task.optimizer.step()
    task.optimizer.zero_grad()
    return task


JOBS = {
    "AdamW assumed": lambda: TrainingTask(mlp(), vectors()),
    "an optimizer's instance": with_instance,
    "an optimizer with a state": with_state,
    "a loss that is a module": lambda: TrainingTask(mlp(), vectors(), loss_fn=nn.CrossEntropyLoss(torch.ones(3))),
    "a step function": lambda: TrainingTask(
        mlp(), vectors(), step_fn=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
    ),
    "bfloat16": lambda: TrainingTask(mlp(), vectors(), autocast_dtype=torch.bfloat16),
    "a small loader": lambda: TrainingTask(mlp(), vectors(4), global_batch_size=16),
    "the demo's GPT": lambda: byte_gpt(16),
}
