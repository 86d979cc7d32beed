"""Profiler: one trial, from a split to a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from splittune.hardware.base import DeviceMemory, Hardware
from splittune.hardware.oom import is_out_of_memory
from splittune.profiling.measurement import LossPlacement, Measurement, Outcome
from splittune.profiling.recorder import Recorder
from splittune.split import BatchSplit
from splittune.training import SampleBatch, Snapshot, TrainingStep, TrainingTask

# A real clock is asked until it settles. A modelled one repeats exactly, and once is enough.
NUM_WARM_UPS = 2
MIN_ROUNDS, MAX_ROUNDS = 3, 10
SETTLED_RELATIVE_SPREAD = 0.02
NUM_WHOLE_STEPS = 5


class Profiler:
    """Runs trials of one task on one piece of hardware, and leaves the task as it was after each.

    A trial wraps the model, warms up, then times micro-steps and the optimizer's update apart, so that one with 32
    accumulation steps costs no more than one with 3. Peaks of memory are read for both phases. Running out of memory
    and keeping too little headroom are outcomes; every other exception is the user's own and passes through untouched.

    Args:
        task: the job.
        hardware: where it runs.
        samples: what micro-batches are made of.
        snapshot: the task's state, put back after every trial.
        min_headroom_bytes: what every device must keep free at its peak; one number or one per device.
        loss_placement: where trials compute the loss.
    """

    def __init__(
        self,
        task: TrainingTask,
        hardware: Hardware,
        samples: SampleBatch,
        snapshot: Snapshot,
        *,
        min_headroom_bytes: int | Sequence[int] = 0,
        loss_placement: LossPlacement = "output",
    ) -> None:
        self._task, self._hardware, self._samples, self._snapshot = task, hardware, samples, snapshot
        self._min_headroom_bytes = min_headroom_bytes
        self._loss_placement = loss_placement

    def measure(self, split: BatchSplit) -> Measurement:
        """Micro-steps and updates of `split`, timed apart, in rounds that end with an update."""
        return self._trial(split, self._run_rounds)

    def measure_whole_steps(self, split: BatchSplit) -> Measurement:
        """Complete optimizer steps of `split`, every micro-batch included: what training will do."""
        return self._trial(split, self._run_whole_steps)

    def _trial(self, split: BatchSplit, run: Callable[[TrainingStep, Recorder], None]) -> Measurement:
        recorder = Recorder(self._hardware)
        lacking: str | None = None
        memory: tuple[DeviceMemory, ...] = ()
        try:
            with self._hardware.metered():
                try:
                    run(self._start(split), recorder)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    lacking = _describe(error, self._hardware.locate(error))
                    memory = self._hardware.memory()
        finally:
            # The except block is left: no frame of a failed step holds tensors any more, so they can be collected.
            try:
                _finish_backward()
                self._hardware.recover()
            finally:
                self._snapshot.restore()
        if lacking is not None:
            return Measurement(
                split=split,
                outcome=Outcome.OUT_OF_MEMORY,
                memory=memory,
                loss_placement=self._loss_placement,
                message=lacking,
            )
        measurement = replace(recorder.measurement(split), loss_placement=self._loss_placement)
        return measurement.judged(self._min_headroom_bytes)

    def _start(self, split: BatchSplit) -> TrainingStep:
        in_replica = self._loss_placement == "replica"
        loss_fn = self._task.loss_in_replica(self._samples.batch) if in_replica else None
        model = self._hardware.wrap(self._task.model, split, loss_fn=loss_fn)
        if not self._task.model.training:  # else the modes stay: a job may keep a frozen part of its model in eval mode
            model.train()
        optimizer = self._task.make_optimizer()
        self._hardware.prepare_optimizer(optimizer)
        return TrainingStep(self._task, model, optimizer, split, self._samples)

    def _run_rounds(self, step: TrainingStep, recorder: Recorder) -> None:
        # The first micro-step of a step copies the parameters out, the last one brings the gradients home, and those
        # between are alike: three kinds, so three micro-steps tell the time of any number of them.
        num_micro_steps = min(step.split.accumulation_steps, 3)
        for _ in range(1 if self._hardware.is_modelled else NUM_WARM_UPS):
            with recorder.phase("warm_up"):
                step.micro_step()
                step.update()
        rounds_s: list[float] = []
        while not self._has_settled(rounds_s):
            for number in range(1, num_micro_steps + 1):
                with recorder.phase("micro_step"):
                    step.micro_step(last=number == num_micro_steps)
            with recorder.phase("update"):
                step.update()
            rounds_s.append(sum(recorder.times_s["micro_step"][-num_micro_steps:]))

    def _run_whole_steps(self, step: TrainingStep, recorder: Recorder) -> None:
        with recorder.phase("warm_up"):
            step.micro_step()
            step.update()
        for _ in range(1 if self._hardware.is_modelled else NUM_WHOLE_STEPS):
            with recorder.phase("whole_step"):
                step.whole()

    def _has_settled(self, rounds_s: Sequence[float]) -> bool:
        if self._hardware.is_modelled:
            return len(rounds_s) == 1
        if len(rounds_s) < MIN_ROUNDS:
            return False
        recent = rounds_s[-MIN_ROUNDS:]
        return len(rounds_s) == MAX_ROUNDS or max(recent) - min(recent) <= SETTLED_RELATIVE_SPREAD * median(recent)


def _finish_backward() -> None:
    """Have autograd drop what is left of a backward pass that failed: it does so at the next one of this thread."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()


def _describe(error: BaseException, device: int | None) -> str:
    """The error in one line, led by the device it is about where that is known: the search reads it there."""
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return first_line if device is None else f"device {device}: {first_line}"
