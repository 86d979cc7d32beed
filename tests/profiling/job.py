"""A small job for trials, which writes down what is run of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled, nn, optim, randn

from splittune.profiling.profiler import Profiler
from splittune.split import BatchSplit
from splittune.training import TrainingTask, read_batches
from tests.profiling.fake_hardware import FakeHardware
from tests.training.state import state_of

B = 64


class Model(nn.Module):
    """Counts its samples in a buffer; `on_forward` may fail."""

    def __init__(self, on_forward: Callable[[Tensor], None] = lambda x: None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.backbone = nn.BatchNorm1d(2)
        self.on_forward = on_forward

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward(x)
        return self.linear(self.backbone(x) if len(x) > 1 else x)


class Job:
    """A task that writes down the size of every micro-step, and 'update' for every update."""

    def __init__(self, hardware: FakeHardware, **options: Any) -> None:
        self.hardware = hardware
        self.steps: list[int | str] = []
        self.model = options.pop("model", None) or Model()
        self.on_update: Callable[[], None] = options.pop("on_update", lambda: None)
        demands = options.pop("min_headroom_bytes", 0)
        job = self

        class Sgd(optim.SGD):
            def step(self, closure: Any = None) -> None:
                job.steps.append("update")
                job.on_update()
                super().step()

        self.optimizer = Sgd(self.model.parameters(), lr=0.1, momentum=0.9)
        loader = [(randn(B, 2), randn(B, 1))]
        self.task = TrainingTask(self.model, loader, loss_fn=self._loss, optimizer=self.optimizer, **options)
        self.state = state_of(self.model, self.optimizer)
        self.profiler = Profiler(
            self.task, hardware, read_batches(loader), self.task.snapshot(), min_headroom_bytes=demands
        )

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        if is_grad_enabled():
            self.steps.append(len(output))
        return nn.functional.mse_loss(output, targets)


def split(accumulation_steps: int) -> BatchSplit:
    return BatchSplit.even(global_batch_size=B, accumulation_steps=accumulation_steps, num_devices=2)
