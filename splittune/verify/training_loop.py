"""The training loop as a user writes it: what `verify` runs under a config."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from splittune.config import SplitConfig
from splittune.hardware import Hardware
from splittune.parallel.base import SplitModule
from splittune.training import TrainingTask


class TrainingLoop:
    """The wrapped model, its optimizer, and what the loop's variables hold."""

    def __init__(
        self, config: SplitConfig, task: TrainingTask, hardware: Hardware, loss_fn: Callable[..., Any] | None
    ) -> None:
        self._config, self._task = config, task
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._model = self._wrapped(hardware, loss_fn)
        self.notes = [str(warning.message) for warning in said]
        # Else the modes stay as they are: a job may keep a frozen part of its model in eval mode.
        if not task.model.training:
            self._model.train()
        self._optimizer = task.make_optimizer()
        hardware.prepare_optimizer(self._optimizer)
        task.place_others(hardware)
        # A loop's variables keep the last loss, output and targets while the next forward runs,
        # and while the loop evaluates.
        self._latest: tuple[Any, ...] = ()

    def _wrapped(self, hardware: Hardware, loss_fn: Callable[..., Any] | None) -> SplitModule:
        return self._config.wrap(self._task.model, loss_fn, hardware=hardware)

    def step(self, batch: Any) -> float:
        """Take one optimizer step, and return the loss over the whole batch."""
        total = 0.0
        for micro in self._config.micro_batches(batch, self._model):
            self._latest = self._task.loss_of(self._model, micro.batch)
            loss = self._latest[0]
            self._task.scaled(loss * micro.weight).backward()
            total += float(loss.detach()) * micro.weight
        self._task.update(self._optimizer)
        return total

    def evaluate(self, batches: Iterable[Any]) -> None:
        """Compute the loss of each batch at once, in eval mode without gradients.

        Afterwards every module is in the mode it was in.
        """
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            with torch.no_grad():
                for batch in batches:
                    latest = self._task.loss_of(self._model, batch)
                del latest
        finally:
            for module, mode in modes:
                module.training = mode
