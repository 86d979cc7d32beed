"""Trials on shapes: the job's own step over virtual GPUs, on tensors that have no values."""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from splittune.fakes import NEEDS_VALUES, FakeTensorMode
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.tape import Tape, TapedHardware
from splittune.profiling.measurement import LossPlacement, Measurement
from splittune.profiling.profiler import Profiler
from splittune.runners.base import JobFacts
from splittune.runners.fake_copy import Unkept, on_shapes, without_values
from splittune.runners.in_process import InProcessRunner
from splittune.runners.module_memory import memory_by_module
from splittune.runners.replay import PlayingProfiler, Scripts, TapingProfiler
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from splittune.training.module_memory import ModuleMemory
from splittune.training.reach import reach

logger = logging.getLogger(__name__)

_ON_REAL_TENSORS = "Trials run on real tensors, which takes longer: %s"
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class ShapeRunner:
    """Runs a job's trials over virtual GPUs on a copy that has shapes and no values, a new one for each trial.

    No arithmetic is done: GPT-2's first split (124 million parameters, 4 cards) takes some 1.6 seconds of one core at 1
    accumulation step and 2.7 at 4, whatever the batch size, and no memory for activations. Allocations, peaks and
    modelled times are those of a run on real tensors.

    With `scripts` a few trials are taped, and all others played from them, which takes a tenth of a second (`Scripts`).
    A micro-batch of what is measured at the end of a search is run in full, and says whether the script holds.

    The job's model and optimizer are only read, and what else its functions change, random generators and lists say,
    is put back by `close` as `InProcessRunner` puts it back. Where a step needs values, a loss that is read in it say,
    the trials go on with real tensors as that one's do, and `needs_values` says why.

    Worked: of ``if loss.item() > 100:`` in line 12 of train.py, `needs_values` is "aten._local_scalar_dense needs
    values: train.py:12, in step: if loss.item() > 100:".

    Args:
        task: the job.
        hardware: the cards.
        scripts: of this job, where they are wanted; runners of other cards and batch sizes may share them.
        looks_at_modules: have `open` say what each module keeps for the backward, which takes a forward.
    """

    def __init__(
        self,
        task: TrainingTask,
        hardware: VirtualHardware,
        scripts: Scripts | None = None,
        *,
        looks_at_modules: bool = True,
    ) -> None:
        self._task, self._hardware, self._scripts = task, hardware, scripts
        self._looks_at_modules = looks_at_modules
        self._real = InProcessRunner(task, hardware, at_once=False)
        self._known: dict[tuple[BatchSplit, LossPlacement], Measurement] = {}
        self._modules: list[ModuleMemory] = []  # one for all runners beside this one
        self.needs_values: str | None = why_not(task)
        """Why trials run on real tensors; None as long as they do not."""

    def beside(self, hardware: VirtualHardware, scripts: Scripts | None = None) -> ShapeRunner:
        """A runner of the same job on other cards, and with other scripts: open as long as this one is."""
        other = copy.copy(self)
        other._hardware, other._real = hardware, self._real.beside(hardware)
        other._scripts, other._known = scripts, {}
        return other

    def open(self, placements: Sequence[LossPlacement]) -> JobFacts:
        if self.needs_values is not None:
            logger.warning(_ON_REAL_TENSORS, self.needs_values)
        facts = self._real.open(placements)
        if self.needs_values is not None or not self._looks_at_modules:
            return facts
        return replace(facts, modules=self._modules_of(facts))

    def _modules_of(self, facts: JobFacts) -> tuple[ModuleMemory, ...]:
        """With the activations that they keep, where a forward of two samples tells."""
        if not self._modules:
            try:
                self._modules += memory_by_module(self._task, self._real.samples, self._hardware, self._real.kept)
            except Exception as error:  # noqa: BLE001  the job's own, of a batch of two: no reason to lose a search
                logger.debug("What modules keep is not known: %s", error)
                self._modules += facts.modules
        return tuple(self._modules)

    def profiler(self, *, min_headroom_bytes: Sequence[int], loss_placement: LossPlacement) -> ShapeProfiler:
        return ShapeProfiler(self, tuple(min_headroom_bytes), loss_placement)

    def close(self) -> None:
        """Leave the job as it was found."""
        self._real.close()

    def measure(
        self, split: BatchSplit, headroom: Sequence[int], placement: LossPlacement, *, in_full: bool
    ) -> Measurement:
        """One trial: from a script, on shapes, or on real tensors once it is known that shapes will not do.

        The same split gives the same figures, so it is run once.
        """
        if (split, placement) not in self._known:
            self._known[split, placement] = self._measure(split, headroom, placement)
        if in_full and self._is_wrong(split, headroom, placement):
            self._known[split, placement] = self._measure(split, headroom, placement, play=False)
        return self._known[split, placement]

    def _is_wrong(self, split: BatchSplit, headroom: Sequence[int], placement: LossPlacement) -> bool:
        """Whether the split was played from a script that a step run in full does not bear out."""
        scripts = self._scripts
        if scripts is None or self.needs_values is not None or not scripts.was_played(split, placement):
            return False
        scripts.check(
            *(split, placement),
            played=lambda one: self._measure(one, headroom, placement),
            in_full=lambda one: self._measure(one, headroom, placement, play=False),
        )
        return not scripts.hold or self.needs_values is not None

    def _measure(
        self, split: BatchSplit, headroom: Sequence[int], placement: LossPlacement, *, play: bool = True
    ) -> Measurement:
        if self.needs_values is None:
            try:
                played = self._played(split, headroom, placement) if play else None
                return self._on_shapes(split, headroom, placement) if played is None else played
            except NEEDS_VALUES as error:
                self.needs_values = describe_need(error)
                logger.warning(_ON_REAL_TENSORS, self.needs_values)
        return self._real.profiler(min_headroom_bytes=headroom, loss_placement=placement).measure(split)

    def _played(self, split: BatchSplit, headroom: Sequence[int], placement: LossPlacement) -> Measurement | None:
        """From a script; None where none tells what this split does."""
        if self._scripts is None:
            return None

        def tape(shard_sizes: Sequence[int], accumulation_steps: int) -> Tape:
            cards = TapedHardware(self._hardware.gpus, wrapper_bytes=self._hardware.wrapper_bytes)
            with on_shapes(self._task, self._real.samples, self._real.kept) as (task, samples):
                profiler = TapingProfiler(task, cards, samples, Unkept(), loss_placement=placement)
                return profiler.tape(shard_sizes, accumulation_steps)

        script = self._scripts.script_for(split, placement, tape)
        if script is None:
            return None
        profiler = PlayingProfiler(
            *(self._task, self._hardware, self._real.samples, Unkept()),
            min_headroom_bytes=headroom,
            loss_placement=placement,
        )
        profiler.script = script
        return profiler.measure(split)

    def _on_shapes(self, split: BatchSplit, headroom: Sequence[int], placement: LossPlacement) -> Measurement:
        with on_shapes(self._task, self._real.samples, self._real.kept) as (task, samples):
            profiler = Profiler(
                task, self._hardware, samples, Unkept(), min_headroom_bytes=headroom, loss_placement=placement
            )
            return profiler.measure(split)


@dataclass(frozen=True, slots=True)
class ShapeProfiler:
    """Measures splits for a `ShapeRunner`."""

    runner: ShapeRunner
    headroom: tuple[int, ...]
    placement: LossPlacement

    @property
    def needs_values(self) -> str | None:
        """Why trials run on real tensors; None as long as they do not."""
        return self.runner.needs_values

    def measure(self, split: BatchSplit) -> Measurement:
        """Micro-steps and updates of `split`."""
        return self.runner.measure(split, self.headroom, self.placement, in_full=False)

    def measure_whole_steps(self, split: BatchSplit) -> Measurement:
        """The same, which a modelled clock repeats exactly; the script it was played from is checked, if none was."""
        return self.runner.measure(split, self.headroom, self.placement, in_full=True)


def why_not(task: TrainingTask) -> str | None:
    """Why a job needs values, as far as that is known without running it; None where it may do with shapes."""
    if task.grad_scaler is not None and task.grad_scaler.is_enabled():
        return "a gradient scaler looks whether gradients are finite"
    own = set(task.model.modules()) | (
        set(task.loss_fn.modules()) if isinstance(task.loss_fn, torch.nn.Module) else set()
    )
    reached = reach((task.loss_fn, task.step_fn, *task.other_state))
    others = sorted({type(module).__name__ for module in reached.modules if module not in own})
    others += sorted({type(one).__name__ for one in reached.optimizers if one is not task.optimizer})
    if others:
        return f"the step uses {', '.join(others)} beside the model, which are not copied"
    try:
        without_values(task, FakeTensorMode(allow_non_fake_inputs=True))
    except (RuntimeError, NotImplementedError, TypeError, *NEEDS_VALUES) as error:
        return f"the model cannot be copied: {next(iter(str(error).splitlines()), type(error).__name__)}"
    return None


def describe_need(error: BaseException) -> str:
    """The operation, and the innermost line that is neither torch's nor ours."""
    operation = str(error).removesuffix(".default") or type(error).__name__
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    if not frames:
        return f"{operation} needs values."
    last = frames[-1]
    return f"{operation} needs values: {Path(last.filename).name}:{last.lineno}, in {last.name}: {last.line}"
