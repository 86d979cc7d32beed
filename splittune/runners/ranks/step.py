"""One rank's part of a synchronised step, and of several: torch's DistributedDataParallel, timed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import optim

from splittune.hardware import Hardware
from splittune.profiling.pacing import MIN_WHOLE_STEPS, note_skipped
from splittune.profiling.recorder import Recorder
from splittune.ranks.module import DistributedSplit
from splittune.split import BatchSplit
from splittune.split.rank_part import rank_part
from splittune.training import SampleBatch, TrainingTask
from splittune.training.skipped import SkippedUpdates

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
        self._skipped = SkippedUpdates(task, self._on_all)

    @property
    def num_skipped(self) -> int:
        """Steps that the gradient scaler skipped, of those that `took_effect` was asked about."""
        return self._skipped.count

    def took_effect(self) -> bool:
        """Whether the latest step was taken on all ranks; a collective where the job has a gradient scaler.

        Raises:
            ConfigError: more than 40 were skipped in a row; on all ranks.
        """
        return self._skipped.took_effect()

    def _on_all(self, took_effect: bool) -> bool:
        # the sum of gradients is the same everywhere, and so is the verdict: but a rank that saw another one would run
        # more steps than the others, and wait for them
        return self._model.sum_over_ranks(float(not took_effect)) == 0

    def whole(self) -> None:
        """A complete optimizer step."""
        for number, size in enumerate(self._sizes, start=1):
            with nullcontext() if number == len(self._sizes) else self._model.no_sync():
                # kept until the next forward has run, as training loops do
                self._latest = self._task.loss_of(self._model, self._batches[size])
                self._task.scaled(self._latest[0] * (size * self._each)).backward()
        self._task.update(self._optimizer)


def run_whole_steps(step: RankStep, hardware: Hardware) -> Recorder:
    """A few steps to warm up, then those that are timed: on every rank as many, or one would wait for the others.

    A step that the job's gradient scaler skips is run again: it has no update, and would look shorter than one is.
    """
    recorder = Recorder(hardware)
    num_done = 0
    while num_done < NUM_WARM_UP_STEPS:
        with recorder.phase("warm_up"):
            step.whole()
        num_done += step.took_effect()
    num_done = 0
    while num_done < MIN_WHOLE_STEPS:
        with recorder.phase("whole_step"):
            step.whole()
        if step.took_effect():
            num_done += 1
        else:
            recorder.drop_latest(whole_step=1)
    note_skipped(step.num_skipped, recorder)
    return recorder
