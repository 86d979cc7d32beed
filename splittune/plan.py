"""plan(): what a job would do on cards that are not here, told without doing its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short_repr
from typing import Any

from splittune.checks import checked_int
from splittune.errors import ConfigError, NoFeasibleSplitError
from splittune.hardware import resolve_hardware
from splittune.hardware.virtual import VirtualHardware
from splittune.hardware.virtual.script import NUM_TAPES
from splittune.options import DEFAULT_MAX_TRIALS, SearchOptions, headroom_for
from splittune.profiling.measurement import Measurement
from splittune.report import TuneResult
from splittune.report.progress import callback_for
from splittune.runners.replay import Scripts
from splittune.runners.shapes import ShapeRunner
from splittune.split import BatchSplit
from splittune.training import TrainingTask
from splittune.tuner import tune


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSearch:
    """The best split of one batch size on one machine; all of it is modelled."""

    devices: str
    global_batch_size: int | None
    """None for the loader's own."""
    result: TuneResult | None
    """None where nothing fits."""
    lacking: str = ""
    """What was lacking then, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `plan` foretold; memory is accounted, time is modelled."""

    measurements: tuple[Measurement, ...] = ()
    """Of the splits that were given: machine by machine, in their order."""
    searches: tuple[PlannedSearch, ...] = ()
    """Where none were given: machine by machine, and in the order of the batch sizes."""
    needs_values: str | None = None
    """Why the step was run on real tensors; None where shapes did."""


def plan(
    task: TrainingTask,
    devices: str | Sequence[str],
    *,
    global_batch_sizes: Sequence[int] | None = None,
    splits: Sequence[BatchSplit] | None = None,
    min_headroom_bytes: int | Sequence[int] | None = None,
    max_trials: int = DEFAULT_MAX_TRIALS,
    progress: bool = True,
) -> Plan:
    """Foretell memory and speed of a job on machines that are not here.

    The job's own step is run over virtual cards on a copy that has shapes and no values, so that neither the arithmetic
    nor the memory for its activations is needed (`ShapeRunner`). The job is left as it was found.

    Args:
        task: the job, on the CPU.
        devices: a machine, ``"4xRTX3090"``, or several, each as `autotune` takes it.
        global_batch_sizes: each is searched on each machine for its best split; None for the loader's own size.
        splits: exactly these are foretold instead. One that does not fit has no times, and its message says which card
            lacks how much.
        min_headroom_bytes: what every card must keep free at its peak; None for 5 % of what others leave.
        max_trials: splits to search at most, for each machine and batch size.
        progress: show what is being planned.

    Raises:
        ConfigError: an argument cannot be used; all are looked at before any work.
        DeviceError: an unknown card; the message names the nearest.
    """
    machines = [devices] if isinstance(devices, str) else _entries("devices", devices, '["4xRTX3090"]')
    if splits is not None and global_batch_sizes is not None:
        raise ConfigError("got splits and global_batch_sizes: expected one of them. A split has its own batch size.")
    sizes: list[int | None] = [None]
    if global_batch_sizes is not None:
        given = _entries("global_batch_sizes", global_batch_sizes, "[64, 128]")
        sizes = [checked_int("a global batch size", size, at_least=1) for size in given]
    hardware = [_virtual(machine) for machine in machines]
    options = SearchOptions(min_headroom_bytes=min_headroom_bytes, max_trials=max_trials)
    if splits is not None:
        return _foretell(task, hardware, splits, options)
    searches, needs_values, scripts = [], None, Scripts()
    for machine, cards in zip(machines, hardware, strict=True):
        for size in sizes:
            job = task if size is None else replace(task, global_batch_size=size)
            runner = ShapeRunner(job, cards, scripts)
            try:
                result, lacking = tune(runner, options, callback_for(progress)), ""
            except NoFeasibleSplitError as error:
                result, lacking = None, str(error)
            needs_values = needs_values or runner.needs_values
            searches.append(PlannedSearch(devices=machine, global_batch_size=size, result=result, lacking=lacking))
    return Plan(searches=tuple(searches), needs_values=needs_values)


def _foretell(
    task: TrainingTask, machines: Sequence[VirtualHardware], splits: Sequence[BatchSplit], options: SearchOptions
) -> Plan:
    found, needs_values = [], None
    for split in _entries("splits", splits, "[BatchSplit.even(...)]"):
        if not isinstance(split, BatchSplit):
            raise ConfigError(f"splits holds {short_repr(split)}: expected BatchSplits alone.")
        for cards in machines:
            if split.num_devices != len(cards.devices):
                raise ConfigError(
                    f"the split {split} is for {split.num_devices} cards, and {cards.spec} has {len(cards.devices)}."
                )
    scripts = Scripts() if len(set(splits)) > NUM_TAPES else None  # of fewer none would be played
    for cards in machines:
        runner = ShapeRunner(task, cards, scripts)
        try:
            job = runner.open(["output"])
            headroom = headroom_for(job.cards, options.min_headroom_bytes)
            profiler = runner.profiler(min_headroom_bytes=headroom, loss_placement="output")
            found += [profiler.measure(split) for split in splits]
        finally:
            runner.close()
        needs_values = needs_values or runner.needs_values
    return Plan(measurements=tuple(found), needs_values=needs_values)


def _entries(name: str, given: object, example: str) -> list[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ConfigError(f"{name} is {short_repr(given)}: expected a list of at least one entry, such as {example}.")
    return list(given)


def _virtual(machine: str) -> VirtualHardware:
    hardware = resolve_hardware(machine)
    if not isinstance(hardware, VirtualHardware):
        raise ConfigError(
            f'{machine!r} names cards of this machine: a plan is for virtual ones, such as "4xRTX3090". '
            "Use autotune() on real cards."
        )
    return hardware
