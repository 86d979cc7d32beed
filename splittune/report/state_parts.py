"""Parameters and optimizer state within what no batch size changes: of every card, split by split."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from splittune.report.memory_parts import MemoryParts, growth_for, memory_parts
from splittune.report.ranks import each_sample_bytes, parts_of_ranks

if TYPE_CHECKING:
    from splittune.config.data import Strategy
    from splittune.profiling.measurement import Measurement
    from splittune.search import Trial
    from splittune.search.models.growth import Growth
    from splittune.split import BatchSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """What the model takes once; sizes, so nothing has to run."""

    parameter_bytes: int
    """Parameters and buffers."""
    gradient_bytes: int
    """Of the parameters that are trained."""


def model_bytes_of(parameter_bytes: int | None, gradient_bytes: int | None) -> ModelBytes | None:
    """Both sizes; None where one is not known."""
    if parameter_bytes is None or gradient_bytes is None:
        return None
    return ModelBytes(parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes)


class PartsOfTrials:
    """What each card's peak is made of at any split of a search; what a sample costs is worked out once.

    Worked, in MiB: of 40 that no batch size changes, on a card on which 30 rest before a forward, a model of 10 and its
    gradients of 10, which wait there between micro-batches, leave 10 for the optimizer's state. Of the last 20 the
    gradients are 10, and 10 is whatever else is there at the peak. In ranks buckets as large as the gradients rest
    there as well. A loop keeps its last output, too: of a card that rests on more after larger batches the least trial
    tells. Where no gradients wait, those that the backward pass makes are taken to be there: as many as there
    is room for.
    """

    def __init__(self, trials: Iterable[Trial], strategy: Strategy, model: ModelBytes | None) -> None:
        self._trials = tuple(trials)
        self._in_ranks = strategy == "ddp"
        self._model = model
        self._grown: dict[str, Growth] = {}
        self._each: dict[bool, float | None] = {}
        self._resting: dict[int, int | None] = {}

    def of(self, run: Measurement) -> tuple[MemoryParts, ...]:
        """The parts of every card's peak; empty where memory was not read, or the steps did not run."""
        if not run.memory or run.throughput is None:
            return ()
        parts = self._of_ranks(run) if self._in_ranks else self._of_replicas(run)
        if self._model is None:
            return parts
        return tuple(self._with_state(part, self._model, run.split) for part in parts)

    def _of_replicas(self, run: Measurement) -> tuple[MemoryParts, ...]:
        if run.loss_placement not in self._grown:
            self._grown[run.loss_placement] = growth_for(self._trials, run)
        return memory_parts(self._trials, run, grown=self._grown[run.loss_placement])

    def _of_ranks(self, run: Measurement) -> tuple[MemoryParts, ...]:
        accumulates = run.split.accumulation_steps > 1
        if accumulates not in self._each:
            self._each[accumulates] = each_sample_bytes(self._trials, run)
        return parts_of_ranks(self._trials, run, each_bytes=self._each[accumulates])

    def _with_state(self, part: MemoryParts, model: ModelBytes, split: BatchSplit) -> MemoryParts:
        if part.device not in self._resting:
            self._resting[part.device] = self._resting_bytes(part.device, model)
        fixed, resting = part.fixed_bytes, self._resting[part.device]
        if fixed is None or resting is None:
            return part
        parameters, state = min(model.parameter_bytes, fixed), 0
        if self._in_ranks or not part.device:  # else GPU 0 alone updates
            state = max(0, min(resting - model.parameter_bytes, fixed - parameters))
        gradients = min(max(self._waiting_bytes(model, split), model.gradient_bytes), fixed - parameters - state)
        return replace(part, parameter_bytes=parameters, optimizer_bytes=state, gradient_bytes=gradients)

    def _resting_bytes(self, device: int, model: ModelBytes) -> int | None:
        """Parameters and state: the least that rests without gradients in any trial, as a loop keeps outputs, too."""
        told = [
            memory.resting_bytes - self._waiting_bytes(model, run.split)
            for run in (trial.measurement for trial in self._trials)
            for memory in run.memory
            if memory.device == device and memory.resting_bytes is not None
        ]
        return min(told, default=None)

    def _waiting_bytes(self, model: ModelBytes, split: BatchSplit) -> int:
        """Gradients that wait between micro-batches, on GPU 0 without samples, too; and buckets as large, in ranks."""
        return model.gradient_bytes * ((split.accumulation_steps > 1) + self._in_ranks)
