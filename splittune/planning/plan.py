"""plan(): what a job would do on cards that are not here, told without doing its arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from splittune.errors import add_note
from splittune.hardware.virtual import VirtualHardware
from splittune.options import DEFAULT_MAX_TRIALS, StrategyChoice, headroom_for
from splittune.planning.request import PlanRequest, checked_request
from splittune.planning.result import Plan, PlannedSearch
from splittune.planning.storage import FinishedRows
from splittune.planning.sweep import planned_searches
from splittune.profiling.measurement import Measurement
from splittune.report.capacity.progress import PlanCallback, plan_callback_for
from splittune.report.capacity.row import named_of
from splittune.runners.base import SplitProfiler
from splittune.runners.fake_copy import old_objects_left_alone
from splittune.runners.modelled_ranks.kinds import kinds_of
from splittune.runners.modelled_ranks.one_card import OneCardTrials
from splittune.runners.modelled_ranks.step import RankTrials
from splittune.runners.replay import Scripts
from splittune.runners.shapes import ShapeProfiler, ShapeRunner
from splittune.split import BatchSplit
from splittune.training import TrainingTask

# To tape a trial and run a short one takes as long as so many in full.
FEW_SPLITS = 2
_Opened = AbstractContextManager[ShapeProfiler] | AbstractContextManager[RankTrials]


def plan(
    task: TrainingTask,
    devices: str | Sequence[str],
    *,
    global_batch_sizes: Sequence[int] | None = None,
    splits: Sequence[BatchSplit] | None = None,
    min_headroom_bytes: int | Sequence[int] | None = None,
    max_trials: int = DEFAULT_MAX_TRIALS,
    storage: str | os.PathLike[str] | None = None,
    strategy: StrategyChoice = "dp",
    progress: bool = True,
) -> Plan:
    """Foretell memory and speed of a job on machines that are not here.

    The job's own step is run over virtual cards on a copy that has shapes and no values, so that neither the arithmetic
    nor the memory for its activations is needed (`ShapeRunner`). The job is left as it was found. Where the step needs
    values it is run on real tensors, and `Plan.needs_values` says why.

    Args:
        task: the job, on the CPU.
        devices: a machine, ``"4xRTX3090"``, or several, each as `autotune` takes it.
        global_batch_sizes: each is searched on each machine for its best split; None for the loader's own size.
        splits: exactly these are foretold instead. One that does not fit has no times, and its message says which card
            lacks how much.
        min_headroom_bytes: what every card must keep free at its peak; None for 5 % of what others leave.
        max_trials: splits to search at most, for each machine and batch size.
        storage: a file where finished machines and batch sizes are kept: a plan that was interrupted goes on there, and
            a note on what interrupted it says how many are. A job that was changed, other options or another version
            are searched anew. Given splits are not kept.
        strategy: "dp" for one process with a replica on each card; "ddp" for a process for each card, ranks of
            DistributedDataParallel, on one machine or on many (up to 16,384 cards); "either" for both, side by side.
            Ranks are modelled from what one card does with its share (`RankTrials` says how), over links as fast as the
            slowest of the cards' slots: a network between machines, which may be slower, is not modelled.
        progress: show which machine and batch size is being planned, of how many.

    Raises:
        ConfigError: an argument cannot be used; all are looked at before any work.
        DeviceError: an unknown card; the message names the nearest.
    """
    request = checked_request(
        task,
        devices,
        global_batch_sizes=global_batch_sizes,
        splits=splits,
        min_headroom_bytes=min_headroom_bytes,
        max_trials=max_trials,
        strategy=strategy,
    )
    callback = plan_callback_for(progress)
    try:
        with old_objects_left_alone():
            if request.splits is not None:
                return _foretell(request, request.splits, callback)
            return Plan.of(_searched(request, callback, storage))
    finally:
        callback.on_finish()


def _searched(
    request: PlanRequest, callback: PlanCallback, storage: str | os.PathLike[str] | None
) -> list[PlannedSearch]:
    """Every search; what ends them early, Ctrl-C say, is told what is kept."""
    found: list[PlannedSearch] = []
    try:
        for search in planned_searches(request, callback, None if storage is None else FinishedRows(storage)):
            found.append(search)  # noqa: PERF402  one by one, to count them
    except BaseException as error:
        if found:
            kept = (
                f"They are kept in {os.fspath(storage)!r}: the same call goes on there."
                if storage is not None
                else "They are lost: with storage='plan.json' the same call would go on there."
            )
            add_note(error, f"splittune: {len(found)} of {request.num_searches} searches were finished. {kept}")
        raise
    return found


def _foretell(
    request: PlanRequest, splits: Sequence[BatchSplit], callback: PlanCallback, *, are_played: bool = True
) -> Plan:
    found: list[Measurement] = []
    needs_values = None
    scripts = Scripts() if are_played and len(set(splits)) > FEW_SPLITS else None
    one_card: OneCardTrials | None = None
    for machine, hardware in zip(request.machines, request.hardware, strict=True):
        if machine.strategy == "ddp":
            one_card = one_card or OneCardTrials(request.task, hardware, are_played=are_played)
            opened: _Opened = _open_ranks(request, hardware, one_card)
        else:
            opened = _open_cards(request, hardware, scripts)
        with opened as profiler:
            for split in splits:
                callback.on_split(named_of(machine), split, len(found) + 1, len(splits) * len(request.machines))
                found.append(profiler.measure(split))
            found[-len(splits) :] = _checked(found[-len(splits) :], profiler)
        needs_values = needs_values or profiler.needs_values
    if not all(each.scripts_hold for each in (one_card,) if each) or not (scripts is None or scripts.hold):
        return _foretell(request, splits, callback, are_played=False)
    return Plan(measurements=tuple(found), machines=request.machines, needs_values=needs_values)


@contextmanager
def _open_cards(request: PlanRequest, hardware: VirtualHardware, scripts: Scripts | None) -> Iterator[ShapeProfiler]:
    """What measures splits in one process."""
    runner = ShapeRunner(request.task, hardware, scripts, looks_at_modules=False)
    try:
        job = runner.open(["output"])
        headroom = headroom_for(job.cards, request.options.min_headroom_bytes)
        yield runner.profiler(min_headroom_bytes=headroom, loss_placement="output")
    finally:
        runner.close()


@contextmanager
def _open_ranks(request: PlanRequest, hardware: VirtualHardware, one_card: OneCardTrials) -> Iterator[RankTrials]:
    """What measures splits over ranks."""
    try:
        job = one_card.open(hardware)
        headroom = headroom_for(job.cards, request.options.min_headroom_bytes)
        yield RankTrials.of(one_card, hardware, kinds_of(hardware, headroom))
    finally:
        one_card.close()


def _checked(found: Sequence[Measurement], profiler: SplitProfiler) -> list[Measurement]:
    """The measurements, of which the script of the largest micro-batch that fits was checked."""
    fitting = [run.split for run in found if run.throughput is not None]
    largest = max(fitting, key=lambda split: split.micro_batch_size, default=None)
    return [profiler.measure_whole_steps(run.split) if run.split == largest else run for run in found]
