"""verify(): the user's own job trained for some steps under the emitted config, its memory held against the plan."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Protocol

import torch

from splittune.checks import check_int
from splittune.config import SplitConfig
from splittune.config.micro_batches import micro_batch_sizes_of
from splittune.errors import ConfigError
from splittune.hardware import DeviceMemory, Hardware
from splittune.hardware.oom import is_out_of_memory, is_sticky
from splittune.parallel.nesting import batch_size_of, tensors_of
from splittune.report.progress import SilentCallback
from splittune.runners.in_process import InProcessRunner, free_leftovers
from splittune.split.largest import find_largest
from splittune.training import SampleBatch, TrainingTask, read_batches
from splittune.verify.result import Lack, Verification

DEFAULT_NUM_STEPS = 50
NUM_EVALUATIONS = 4
# Batches that are trained first. More than one: where all are equally long, a few steps settle the allocator's cache.
NUM_LONGEST = 3
# An evaluation batch of this many training micro-batches keeps any card busy; one larger still gains nothing.
MAX_EVAL_GROWTH = 64
# Training and evaluation take turns this often: what each leaves in the allocator's cache is in the way of the other.
NUM_ROUNDS = 2

Phase = Literal["training", "evaluation"]


class VerifyCallback(Protocol):
    """Is told how the run goes, for people to watch."""

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
    """Train `task` for some steps under `config`, as its user will, and see whether memory keeps to the plan.

    The loader's batches are trained, in whole steps: first the longest of as many as there are steps, since they decide
    the peak, then the loader from its start, round and round where it has fewer. Right after the longest, and four times
    over the run, a batch is evaluated: ``eval()``, ``torch.no_grad()``, the tuned micro-batches. Afterwards model,
    optimizer, random number generators and loader are as they were found, also when an exception or Ctrl-C ends it.
    Running out of memory is a result; every other exception is the job's own and passes through.

    Where the task's `global_batch_size` is another one than its loader's, batches are cut, or their samples repeated, to
    that size, in proportion where they are short, as the tuner does.

    Args:
        config: what the tuner emitted.
        task: the job it was tuned for.
        hardware: a `Hardware` at hand.
        devices: as in `autotune`; None for those the config was tuned on.
        num_steps: optimizer steps to train.
        measure_eval_batch_size: also find the largest batch that can be evaluated at once under ``torch.no_grad()``
            between training steps and leaves every device its headroom, to within 5 %; the result's config has it.
        callback: is told how it goes.

    Raises:
        ConfigError: config and job do not fit together (another batch size, another number of devices), or the job
            cannot be used.
        DeviceError: the devices cannot be had.
    """
    check_int("num_steps", num_steps, at_least=1)
    hardware = config.resolve(devices, hardware)
    runner = InProcessRunner(task, hardware)
    try:
        runner.snapshot()
        if measure_eval_batch_size:
            config = replace(config, eval_batch_size=None)
        rehearsal = _Rehearsal(config, task, hardware, callback)
        result = rehearsal.run(num_steps)
        if measure_eval_batch_size:
            result = rehearsal.with_eval_batch_size(result)
        return result
    finally:
        runner.close()


class _Rehearsal:
    """One job on one piece of hardware, rehearsed under one config."""

    def __init__(
        self, config: SplitConfig, task: TrainingTask, hardware: Hardware, callback: VerifyCallback | None
    ) -> None:
        self._config, self._task, self._hardware = config, task, hardware
        self._callback: VerifyCallback = SilentCallback() if callback is None else callback
        samples = read_batches(task.loader)
        self._loader_batch_size = samples.loader_batch_size
        self._notes = self._check_batch_size()
        in_replica = config.loss_placement == "replica"
        self._loss_fn = task.loss_in_replica(samples.batch) if in_replica else None
        self._longest: list[Any] = []

    def run(self, num_steps: int) -> Verification:
        """Train and evaluate, with the meter running."""
        self._callback.on_activity(f"reading up to {num_steps} batches, for the longest")
        self._longest = self._find_longest(num_steps)
        course = _Course()
        lack = self._metered(lambda: self._train(num_steps, course), course)
        losses = tuple(course.losses)
        diverged = next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
        if diverged is not None:
            self._notes.append(f"The loss was not finite at step {diverged}: {losses[diverged - 1]}.")
        return Verification(
            config=self._config,
            devices=self._hardware.devices,
            memory=course.fullest,
            training_peak_reserved_bytes=tuple(peak or 0 for peak in course.reserved_in["training"]),
            evaluation_peak_reserved_bytes=tuple(course.reserved_in["evaluation"]),
            losses=losses,
            num_evaluations=course.num_evaluations,
            lack=lack,
            notes=tuple(self._notes),
        )

    def with_eval_batch_size(self, result: Verification) -> Verification:
        """The result, its config with the largest evaluation batch that keeps the headroom."""
        if not (result.is_verified and result.num_evaluations):
            reason = "nothing could be evaluated" if result.is_verified else "the run is not verified"
            return replace(result, notes=(*result.notes, f"No evaluation batch size was measured: {reason}."))
        split = self._config.split
        limit = max(MAX_EVAL_GROWTH * split.micro_batch_size, split.global_batch_size)
        capacities = [memory.total_bytes - memory.outside_bytes for memory in result.memory]
        found = find_largest(self._try_evaluating, start=split.micro_batch_size, limit=limit, capacities=capacities)
        notes = list(result.notes)
        if found == 0:
            notes.append("No evaluation batch size was found: not even one sample at a time keeps the headroom.")
        elif found == limit:
            notes.append(f"Evaluation batches of more than {limit} samples were not tried.")
        return replace(result, config=replace(self._config, eval_batch_size=found or None), notes=tuple(notes))

    def _train(self, num_steps: int, course: _Course) -> None:
        training = _Training(self._config, self._task, self._hardware, self._loss_fn)
        self._notes += training.notes
        evaluations = {math.ceil(num_steps * part / NUM_EVALUATIONS) for part in range(1, NUM_EVALUATIONS + 1)}
        evaluations.add(len(self._longest))
        batches, can_evaluate = self._batches(), True
        for step in range(1, num_steps + 1):
            course.where, course.phase = f"step {step}", "training"
            batch = next(batches)
            course.losses.append(training.step(batch))
            course.read(self._hardware.memory())
            self._callback.on_step(step, num_steps, course.losses[-1])
            if step in evaluations and can_evaluate:
                course.where, course.phase = f"the evaluation after step {step}", "evaluation"
                can_evaluate = self._evaluate(training, batch)
                course.num_evaluations += can_evaluate
                course.read(self._hardware.memory())

    def _evaluate(self, training: _Training, batch: Any) -> bool:
        """Whether the batch could be evaluated at all, memory aside."""
        at_once = self._config.eval_batch_size
        if at_once is None:
            micro_batches = [micro.batch for micro in self._config.micro_batches(batch)]
        else:
            micro_batches = [_resized(batch, at_once)]
        if len(micro_batches) == 1:  # over a whole validation set one output is still there when the next is made
            micro_batches *= 2
        try:
            training.evaluate(micro_batches)
        except Exception as error:
            is_about_memory = is_out_of_memory(error) or is_sticky(error)
            if is_about_memory or not (self._task.step_fn is not None or isinstance(error, ConfigError)):
                raise
            what = "step_fn" if self._task.step_fn is not None else "the job's loss"
            self._notes.append(
                f"Evaluation was not verified: {what} cannot be computed in eval() under torch.no_grad() "
                f"({type(error).__name__}: {error})."
            )
            return False
        return True

    def _try_evaluating(self, size: int) -> tuple[bool, tuple[int, ...]]:
        """Whether batches of `size` keep the headroom between training steps, and the evaluation's peak allocated bytes."""
        self._callback.on_activity(f"evaluating {size} samples at once")
        course = _Course()
        allocated: list[tuple[int, ...]] = []

        def act() -> None:
            config = replace(self._config, eval_batch_size=max(size, self._config.split.micro_batch_size))
            training = _Training(config, self._task, self._hardware, self._loss_fn)
            for _ in range(NUM_ROUNDS):
                training.step(self._longest[0])
                course.read(self._hardware.memory())
                self._hardware.reset_peaks()
                training.evaluate([_resized(self._longest[0], size)] * 2)
                memory = self._hardware.memory()
                allocated.append(tuple(each.peak_allocated_bytes for each in memory))
                course.read(memory)

        lack = self._metered(act, course)
        demands = zip(self._config.min_headroom_bytes, course.fullest, strict=True)
        keeps = lack is None and all(memory.headroom_bytes >= demanded for demanded, memory in demands)
        return keeps, allocated[-1] if lack is None else ()

    def _metered(self, act: Callable[[], None], course: _Course) -> Lack | None:
        """`act` with the meter running, on empty devices; what it lacked, None if nothing. Nothing else is caught."""
        lack = None
        free_leftovers(self._hardware)
        with self._hardware.metered():
            try:
                act()
            except Exception as error:
                if is_sticky(error) or not is_out_of_memory(error):
                    raise
                message = next(iter(str(error).splitlines()), type(error).__name__)
                lack = Lack(where=course.where, device=self._hardware.locate(error), message=message)
                course.read(self._hardware.memory())
        return lack

    def _check_batch_size(self) -> list[str]:
        split, wanted = self._config.split, self._task.global_batch_size
        given = self._loader_batch_size if wanted is None else wanted
        if given != split.global_batch_size:
            whose = "the loader gives batches of" if wanted is None else "the task's global_batch_size is"
            raise ConfigError(
                f"the config was tuned for batches of {split.global_batch_size} samples ({split}), and {whose} {given}: "
                f"expected {split.global_batch_size}. Is this the job it was tuned for? Set the loader's batch size to "
                f"{split.global_batch_size}, or tune this job."
            )
        note = (
            f"The loader gives batches of {self._loader_batch_size}, and the global batch size is {given}: their samples "
            f"were cut or repeated to {given}. Training needs a loader of batch size {given}."
        )
        return [] if given == self._loader_batch_size else [note]

    def _find_longest(self, num_batches: int) -> list[Any]:
        """Those of the loader's first batches whose micro-batches have most elements, the largest first."""
        kept: list[tuple[float, int, Any]] = []
        for number, batch in enumerate(islice(self._round(), num_batches)):
            size = batch_size_of(batch)
            micro_batch_size = micro_batch_sizes_of(size, self._config.split)[0]
            cost = sum(tensor.numel() for _, tensor in tensors_of(batch)) / size * micro_batch_size
            kept = sorted([*kept, (-cost, number, batch)], key=lambda entry: entry[:2])[:NUM_LONGEST]
        return [batch for _, _, batch in kept]

    def _batches(self) -> Iterator[Any]:
        """The longest, then the loader's, without end."""
        yield from self._longest
        while True:
            is_empty = True
            for batch in self._round():
                is_empty = False
                yield batch
            if is_empty:
                raise ConfigError(
                    "the loader gave no batch when it was iterated over again: expected a DataLoader or list."
                )

    def _round(self) -> Iterator[Any]:
        """The loader's batches once, in the size the config is for."""
        for batch in self._task.loader:
            if self._loader_batch_size == self._config.split.global_batch_size:
                yield batch
            else:
                ratio = self._config.split.global_batch_size / self._loader_batch_size
                yield _resized(batch, math.ceil(batch_size_of(batch) * ratio))


class _Training:
    """A training loop as a user writes it: the wrapped model, its optimizer, and what the loop's variables hold."""

    def __init__(
        self, config: SplitConfig, task: TrainingTask, hardware: Hardware, loss_fn: Callable[..., Any] | None
    ) -> None:
        self._config, self._task = config, task
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._model = config.wrap(task.model, loss_fn, hardware=hardware)
        self.notes = [str(warning.message) for warning in said]
        if not task.model.training:  # else the modes stay: a job may keep a frozen part of its model in eval mode
            self._model.train()
        self._optimizer = task.make_optimizer()
        hardware.prepare_optimizer(self._optimizer)
        # A loop's variables keep the last loss, output and targets while the next forward runs, and while it evaluates.
        self._latest: tuple[Any, ...] = ()

    def step(self, batch: Any) -> float:
        """One optimizer step; the loss over the whole batch."""
        total = 0.0
        for micro in self._config.micro_batches(batch, self._model):
            self._latest = self._task.loss_of(self._model, micro.batch)
            loss = self._latest[0]
            (loss * micro.weight).backward()
            total += float(loss.detach()) * micro.weight
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def evaluate(self, batches: Iterable[Any]) -> None:
        """The losses of these batches, each at once, in eval mode and without gradients; then every mode as before."""
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


@dataclass(slots=True)
class _Course:
    """How far a run has come, and what was read of the devices' memory."""

    where: str = ""
    phase: Phase = "training"
    losses: list[float] = field(default_factory=list)
    num_evaluations: int = 0
    fullest: tuple[DeviceMemory, ...] = ()
    reserved_in: dict[Phase, list[int | None]] = field(default_factory=dict)

    def read(self, memory: tuple[DeviceMemory, ...]) -> None:
        """Peaks only grow, so what raises one is the phase that is read after it."""
        if not self.fullest:
            self.fullest = memory
            self.reserved_in = {"training": [0] * len(memory), "evaluation": [None] * len(memory)}
        for index, each in enumerate(memory):
            if each.peak_reserved_bytes > max(peaks[index] or 0 for peaks in self.reserved_in.values()):
                self.reserved_in[self.phase][index] = each.peak_reserved_bytes
        pairs = zip(self.fullest, memory, strict=True)
        self.fullest = tuple(min(pair, key=lambda one: one.headroom_bytes) for pair in pairs)


def _resized(batch: Any, num_samples: int) -> Any:
    """The batch's first samples, over again where it has fewer."""
    size = batch_size_of(batch)
    return SampleBatch(batch=batch, batch_size=size, loader_batch_size=size).micro_batch(num_samples)
