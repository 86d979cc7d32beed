"""verify(): the user's own job trained under the emitted config, its memory beside the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from splittune.checks import checked_int
from splittune.config import SplitConfig
from splittune.errors import ConfigError
from splittune.hardware import Hardware
from splittune.hardware.oom import is_out_of_memory, is_sticky
from splittune.report.progress import SilentCallback
from splittune.runners.in_process import InProcessRunner
from splittune.training import TrainingTask, read_batches
from splittune.verify.batches import RunBatches, resized
from splittune.verify.eval_batch import with_eval_batch_size
from splittune.verify.result import Verification
from splittune.verify.run_state import RunState, run_metered
from splittune.verify.training_loop import TrainingLoop

# Long enough for the allocator's cache to settle, and a minute or two of most jobs. A choice.
DEFAULT_NUM_STEPS = 50
# Evaluations over the run, besides the one after the longest batches. A choice.
NUM_EVALUATIONS = 4


class VerifyCallback(Protocol):
    """Is told how the run goes."""

    def on_activity(self, what: str) -> None: ...

    def on_step(self, step: int, num_steps: int, loss: float) -> None: ...


def verify(
    config: SplitConfig,
    task: TrainingTask,
    *,
    hardware: Hardware | None = None,
    devices: str | Sequence[str | int | torch.device] | None = None,
    num_steps: int = DEFAULT_NUM_STEPS,
    measure_eval_batch_size: bool = False,
    callback: VerifyCallback | None = None,
) -> Verification:
    """Train `task` for some steps under `config` as its user will; compare memory with the plan.

    The loader's batches are trained, in whole steps: first the longest of as many as there are
    steps, since they decide the peak, then the loader from its start, round and round where it has
    fewer. Right after the longest, and four times over the run, a batch is evaluated: ``eval()``,
    ``torch.no_grad()``, the tuned micro-batches. Afterwards model, optimizer, random number
    generators and loader are as they were found, also when an exception or Ctrl-C ends it. Running
    out of memory is a result; every other exception is the job's own and passes through.

    Where the task's `global_batch_size` is another one than its loader's, batches are cut, or their
    samples repeated, to that size, in proportion where they are short, as the tuner does.

    Args:
        config: what the tuner emitted.
        task: the job it was tuned for.
        hardware: a `Hardware` at hand.
        devices: as in `autotune`; None for those the config was tuned on.
        num_steps: optimizer steps to train.
        measure_eval_batch_size: also find the largest batch that can be evaluated at once under
            ``torch.no_grad()`` between training steps and leaves every device its headroom, to
            within 5 %; the result's config has it.
        callback: is told how it goes.

    Raises:
        ConfigError: config and job do not fit together (another batch size, another number of
            devices), or the job cannot be used.
        DeviceError: the devices cannot be had.
    """
    num_steps = checked_int("num_steps", num_steps, at_least=1)
    hardware = config.resolve(devices, hardware)
    callback = SilentCallback() if callback is None else callback
    runner = InProcessRunner(task, hardware)
    try:
        runner.snapshot()
        if measure_eval_batch_size:
            config = replace(config, eval_batch_size=None)
        rehearsal = Rehearsal(config, task, hardware, callback)
        result = rehearsal.run(num_steps)
        if measure_eval_batch_size:
            result = with_eval_batch_size(
                result,
                task,
                hardware,
                batch=rehearsal.longest[0],
                loss_fn=rehearsal.loss_fn,
                on_activity=callback.on_activity,
            )
        return result
    finally:
        runner.close()


class Rehearsal:
    """One job on one piece of hardware, rehearsed under one config."""

    def __init__(self, config: SplitConfig, task: TrainingTask, hardware: Hardware, callback: VerifyCallback) -> None:
        self._config, self._task, self._hardware, self._callback = config, task, hardware, callback
        samples = read_batches(task.loader)
        self._batches = RunBatches(config, task, loader_batch_size=samples.loader_batch_size)
        self._notes = list(self._batches.notes)
        self.loss_fn = task.loss_in_replica(samples.batch) if config.loss_placement == "replica" else None
        self.longest: list[Any] = []
        """The batches that decide the peak, largest first; known once it ran."""

    def run(self, num_steps: int) -> Verification:
        """Train and evaluate, with the meter running."""
        self._callback.on_activity(f"reading up to {num_steps} batches, for the longest")
        self.longest = self._batches.find_longest(num_steps)
        state = RunState()
        lack = run_metered(self._hardware, lambda: self._train(num_steps, state), state)
        losses = tuple(state.losses)
        diverged = next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
        if diverged is not None:
            self._notes.append(f"The loss was not finite at step {diverged}: {losses[diverged - 1]}.")
        return Verification(
            config=self._config,
            devices=self._hardware.devices,
            memory=state.fullest,
            training_peak_reserved_bytes=tuple(peak or 0 for peak in state.reserved_in["training"]),
            evaluation_peak_reserved_bytes=tuple(state.reserved_in["evaluation"]),
            losses=losses,
            num_evaluations=state.num_evaluations,
            is_modelled=self._hardware.is_modelled,
            lack=lack,
            notes=tuple(self._notes),
        )

    def _loop(self) -> TrainingLoop:
        return TrainingLoop(self._config, self._task, self._hardware, self.loss_fn)

    def _share_of(self, batch: Any) -> Any:
        """What this process trains of a batch."""
        return batch

    def _train(self, num_steps: int, state: RunState) -> None:
        training = self._loop()
        self._notes += training.notes
        evaluations = {math.ceil(num_steps * part / NUM_EVALUATIONS) for part in range(1, NUM_EVALUATIONS + 1)}
        evaluations.add(len(self.longest))
        batches, can_evaluate = iter(self._batches), True
        for step in range(1, num_steps + 1):
            state.where, state.phase = f"step {step}", "training"
            batch = self._share_of(next(batches))
            state.losses.append(training.step(batch))
            state.read(self._hardware.memory())
            self._callback.on_step(step, num_steps, state.losses[-1])
            if step in evaluations and can_evaluate:
                state.where, state.phase = f"the evaluation after step {step}", "evaluation"
                can_evaluate = self._evaluate(training, batch)
                state.num_evaluations += can_evaluate
                state.read(self._hardware.memory())

    def _evaluate(self, training: TrainingLoop, batch: Any) -> bool:
        """Whether the batch could be evaluated at all, memory aside; a note says why not."""
        at_once = self._config.eval_batch_size
        if at_once is None:
            micro_batches = [micro.batch for micro in self._config.micro_batches(batch)]
        else:
            micro_batches = [resized(batch, at_once, expected=self._config.split.global_batch_size)]
        # Over a whole validation set one output is still there when the next is made.
        if len(micro_batches) == 1:
            micro_batches *= 2
        try:
            training.evaluate(micro_batches)
        except Exception as error:
            is_about_memory = is_sticky(error) or is_out_of_memory(error, self._hardware.free_bytes)
            if is_about_memory or not (self._task.step_fn is not None or isinstance(error, ConfigError)):
                raise
            what = "step_fn" if self._task.step_fn is not None else "the job's loss"
            self._notes.append(
                f"Evaluation was not verified: {what} cannot be computed in eval() under torch.no_grad() "
                f"({type(error).__name__}: {error})."
            )
            return False
        return True
