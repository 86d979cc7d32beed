"""Profiler: one trial, from a split to a measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

from splittune.errors import add_note
from splittune.hardware.base import DeviceMemory, Hardware
from splittune.hardware.oom import is_out_of_memory, is_sticky
from splittune.profiling.measurement import LossPlacement, Measurement, Outcome
from splittune.profiling.pacing import Pacer, Step
from splittune.profiling.recorder import Recorder
from splittune.profiling.watch import DeviceWatch
from splittune.split import BatchSplit
from splittune.training import SampleBatch, Snapshot, TrainingStep, TrainingTask

logger = logging.getLogger(__name__)

_Run = Callable[[Step, Recorder], None]


class Profiler:
    """Runs trials of one task on one piece of hardware, and leaves the task as it was after each.

    A trial wraps the model, warms up, then times micro-steps and the optimizer's update apart, so
    that one with 32 accumulation steps costs no more than one with 3 (`Pacer` says how much is
    run). On a real clock it also times them unbroken, since training does not stop between them.
    Peaks of memory are read for both phases. Running out of memory, and keeping too little
    headroom, are outcomes. Every other exception is the user's own and passes through untouched.

    On real devices a trial is run once more if other programs took or gave back memory meanwhile,
    or if a device was throttled. The second run counts, and its notes say so.

    After a CUDA error that leaves the process without its devices nothing on them is touched any
    more. What is on the host is put back, and the error passes through with a note.

    Args:
        task: the job.
        hardware: where it runs.
        samples: what micro-batches are made of.
        snapshot: the task's state, put back after every trial.
        min_headroom_bytes: what every device must keep free at its peak; one number or one per
            device.
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
        self.hardware = hardware
        self._task, self._samples, self._snapshot = task, samples, snapshot
        self._min_headroom_bytes = min_headroom_bytes
        self._loss_placement = loss_placement
        self._pacer = Pacer(is_modelled=hardware.is_modelled)
        self._watch = DeviceWatch(hardware)

    def measure(self, split: BatchSplit) -> Measurement:
        """Micro-steps and updates of `split`, timed apart, in rounds that end with an update."""
        measurement = self.measure_by_itself(split)
        self._pacer.remember(measurement)
        return measurement

    def measure_by_itself(self, split: BatchSplit) -> Measurement:
        """The same; later trials are not cut short for being slower than this one."""
        return self._trial(split, self._pacer.run_rounds)

    def measure_whole_steps(self, split: BatchSplit) -> Measurement:
        """Complete optimizer steps of `split`, every micro-batch included: as in training.

        Once they are done, the loss is looked at: is it a mean over samples, as training takes it to be?
        """
        return self._trial(split, self._run_whole_steps)

    def _run_whole_steps(self, step: Step, recorder: Recorder) -> None:
        self._pacer.run_whole_steps(step, recorder)
        recorder.loss_exponent = step.loss_exponent()

    def _trial(self, split: BatchSplit, run: _Run) -> Measurement:
        notes = self._watch.before_trial()
        measurement, disturbances = self._attempt(split, run)
        if disturbances:
            logger.warning("%s is measured again. %s", split, " ".join(disturbances))
            notes += tuple(f"Measured again: {_in_a_sentence(disturbance)}" for disturbance in disturbances)
            measurement, _ = self._attempt(split, run)
        if measurement.is_on_the_edge:
            times = measurement.num_alloc_retries
            notes += (
                f"Allocators handed their cache back {times} times in the timed steps: this split only just fits.",
            )
        return replace(measurement, notes=(*notes, *measurement.notes))

    def _attempt(self, split: BatchSplit, run: _Run) -> tuple[Measurement, tuple[str, ...]]:
        """The split measured once, and what disturbed it."""
        state = self._go_through(split, run)
        disturbances = self._watch.changes_during_trial(ran_through=state.lacking is None)
        notes = (*state.throttling, *disturbances, *self._watch.leftovers())
        if state.is_throttled:
            disturbances = (*state.throttling, *disturbances)
        if state.lacking is not None:
            measurement = Measurement(
                split=split, outcome=Outcome.OUT_OF_MEMORY, memory=state.memory, message=state.lacking
            )
        else:
            measurement = state.recorder.measurement(split).judged(self._min_headroom_bytes)
        whole = replace(measurement, loss_placement=self._loss_placement, notes=(*measurement.notes, *notes))
        return whole, disturbances

    def _go_through(self, split: BatchSplit, run: _Run) -> _TrialState:
        state, is_usable = _TrialState(Recorder(self.hardware)), True
        try:
            with self.hardware.metered():
                try:
                    step = self.start(split)
                    step.before_backward = state.recorder.before_backward
                    run(step, state.recorder)
                    state.throttling, state.is_throttled = self._watch.throttling()
                except Exception as error:
                    is_usable = not is_sticky(error)
                    if not is_usable:
                        _say_unusable(error)
                    if not is_usable or not is_out_of_memory(error, self.hardware.free_bytes):
                        raise
                    state.lacking = _describe(error, self.hardware.locate(error))
                    state.memory = self.hardware.memory()
        finally:
            # The except block is left: no frame of a failed step holds tensors any more, so they
            # can be collected.
            self.clean_up(is_usable)
        return state

    def clean_up(self, is_usable: bool) -> None:
        """Empty the devices and put the job back; touch no device that is not usable any more."""
        try:
            if is_usable:
                self.hardware.recover()
        except RuntimeError as error:  # a kernel's own error may show only now
            is_usable = not is_sticky(error)
            if not is_usable:
                _say_unusable(error)
            raise
        finally:
            # What lives on such a device is lost, and putting it back raises once more: the first
            # error is what counts.
            with nullcontext() if is_usable else suppress(RuntimeError):
                self._snapshot.restore()

    def start(self, split: BatchSplit) -> Step:
        """The step of a trial, its model and optimizer on the devices."""
        in_replica = self._loss_placement == "replica"
        loss_fn = self._task.loss_in_replica(self._samples.batch) if in_replica else None
        model = self.hardware.wrap(self._task.model, split, loss_fn=loss_fn)
        if not self._task.model.training:  # else the modes stay: a job may keep a frozen part of its model in eval mode
            model.train()
        optimizer = self._task.make_optimizer()
        self.hardware.prepare_optimizer(optimizer)
        self._task.place_others(self.hardware)
        return TrainingStep(self._task, model, optimizer, split, self._samples)


@dataclass(slots=True)
class _TrialState:
    """What is known of a trial as it runs."""

    recorder: Recorder
    lacking: str | None = None
    """Of a trial that ran out of memory, the error in one line."""
    memory: tuple[DeviceMemory, ...] = ()
    """What was read when it did."""
    throttling: tuple[str, ...] = ()
    is_throttled: bool = False


def _describe(error: BaseException, device: int | None) -> str:
    """The error in one line, after its device's index where that is known: the search reads it."""
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return first_line if device is None else f"device {device}: {first_line}"


def _say_unusable(error: BaseException) -> None:
    """Note on the error what it means."""
    add_note(
        error,
        "After this CUDA error the process cannot use its devices any more: the search ends. Start a new process; "
        "trials that were finished are in the storage, if one was given, and the search goes on from there.",
    )


def _in_a_sentence(note: str) -> str:
    return note[0].lower() + note[1:]
