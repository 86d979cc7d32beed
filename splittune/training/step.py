"""TrainingStep: one optimizer step of a task under a split, in the parts that are measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import optim

from splittune.parallel.base import SplitModule
from splittune.split import BatchSplit
from splittune.training.batches import SampleBatch
from splittune.training.loss import check_loss
from splittune.training.mean_loss import loss_exponent
from splittune.training.skipped import SkippedUpdates
from splittune.training.task import TrainingTask


class TrainingStep:
    """One optimizer step of a task under a split, in the parts that are measured: micro-steps, then the update."""

    def __init__(
        self,
        task: TrainingTask,
        model: SplitModule,
        optimizer: optim.Optimizer,
        split: BatchSplit,
        samples: SampleBatch,
    ) -> None:
        self.split = split
        self.before_backward: Callable[[], object] = lambda: None
        """Called in every micro-step between its forward and its backward."""
        self._task, self._model, self._optimizer, self._samples = task, model, optimizer, samples
        self._batches = {size: samples.micro_batch(size) for size in sorted(set(split.micro_batch_sizes))}
        self._loss_was_checked = False
        self._latest: tuple[Any, ...] = ()
        self._skipped = SkippedUpdates(task)

    def micro_step(self, num_samples: int | None = None, *, last: bool = True) -> None:
        """Forward and backward of one micro-batch, the largest unless told; its gradient weighs as its samples do.

        The `last` one of a step brings the gradients home.
        """
        size = self.split.micro_batch_size if num_samples is None else num_samples
        with nullcontext() if last else self._model.no_sync():
            self._forward_and_backward(size)

    def _forward_and_backward(self, size: int) -> None:
        # Training loops keep the last loss, output and targets in their variables while the next forward runs: so does
        # this one, or the plan would be short by one output on the card that gathers them.
        self._latest = self._task.loss_of(self._model, self._batches[size])
        loss = self._latest[0]
        if not self._loss_was_checked:
            check_loss(loss, "step_fn" if self._task.step_fn else "the job")
            self._loss_was_checked = True
        scaled = self._task.scaled(loss * (size / self.split.global_batch_size))
        self.before_backward()
        scaled.backward()

    def update(self) -> None:
        """The optimizer's update, and the gradients given back."""
        self._task.update(self._optimizer)

    @property
    def num_skipped(self) -> int:
        """Updates that the gradient scaler skipped, of those that `took_effect` was asked about."""
        return self._skipped.count

    def took_effect(self) -> bool:
        """Whether the latest update was made; False where the gradient scaler skipped it, which lowers its scale.

        Ask after every update, and outside what is timed: reading the scale waits for the device.

        Raises:
            ConfigError: more than 40 were skipped in a row, so no scale will do.
        """
        return self._skipped.took_effect()

    def loss_exponent(self) -> int | None:
        """How the loss grows with the samples, up to a micro-batch: 0 for a mean, 1 for a sum; see `mean_loss`."""
        return loss_exponent(self._task, self._model, self._samples, self.split.micro_batch_size)

    def whole(self) -> None:
        """A complete optimizer step over the global batch."""
        *others, final = self.split.micro_batch_sizes
        for size in others:
            self.micro_step(size, last=False)
        self.micro_step(final)
        self.update()
