"""One rank's part of a synchronised step, and of several: torch's DistributedDataParallel, timed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import optim

from splittune.hardware import Hardware
from splittune.profiling.pacing import MIN_WHOLE_STEPS
from splittune.profiling.recorder import Recorder
from splittune.ranks.module import DistributedSplit
from splittune.split import BatchSplit
from splittune.split.rank_part import rank_part
from splittune.training import SampleBatch, TrainingTask

# Steps before those that are timed, on every rank as many: in the first DistributedDataParallel arranges its buckets
# anew. A choice; more cost time, and the median passes over what a slow fourth adds.
NUM_WARM_UP_STEPS = 3


class RankStep:
    """One rank's part of optimizer steps of a split: its share of every micro-batch, weighed as in training.

    Its loss, a mean over n samples, counts ``n * W / N`` of N behind the step of W ranks; without samples it runs one
    that counts nothing. Gradients are added up in the last micro-step's backward.
    """

    def __init__(
        self,
        task: TrainingTask,
        model: DistributedSplit,
        optimizer: optim.Optimizer,
        split: BatchSplit,
        samples: SampleBatch,
        *,
        rank: int,
    ) -> None:
        self._task, self._model, self._optimizer = task, model, optimizer
        self._sizes = rank_part(split.global_batch_size, split, rank).sizes
        self._batches = {size: samples.micro_batch(max(1, size)) for size in sorted(set(self._sizes))}
        self._each = split.num_devices / split.global_batch_size
        self._latest: tuple[Any, ...] = ()

    def whole(self) -> None:
        """A complete optimizer step."""
        for number, size in enumerate(self._sizes, start=1):
            with nullcontext() if number == len(self._sizes) else self._model.no_sync():
                # kept until the next forward has run, as training loops do
                self._latest = self._task.loss_of(self._model, self._batches[size])
                self._task.scaled(self._latest[0] * (size * self._each)).backward()
        self._task.update(self._optimizer)


def run_whole_steps(step: RankStep, hardware: Hardware) -> Recorder:
    """A few steps to warm up, then those that are timed: on every rank as many, or one would wait for the others."""
    recorder = Recorder(hardware)
    for _ in range(NUM_WARM_UP_STEPS):
        with recorder.phase("warm_up"):
            step.whole()
    for _ in range(MIN_WHOLE_STEPS):
        with recorder.phase("whole_step"):
            step.whole()
    return recorder
