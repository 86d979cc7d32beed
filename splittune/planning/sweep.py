"""The searches of a plan, one after the other, each kept as it finishes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from splittune.config.data import current_versions
from splittune.errors import NoFeasibleSplitError
from splittune.hardware.virtual import VirtualHardware
from splittune.options import MIN_BATCH_NORM_SHARD, headroom_for
from splittune.planning.keep_trials import TrialKeeper
from splittune.planning.largest import largest_micro_batch
from splittune.planning.rank_sweep import RankSweep
from splittune.planning.request import PlanRequest
from splittune.planning.result import Machine, PlannedSearch
from splittune.planning.storage import FinishedRows
from splittune.profiling.measurement import LossPlacement, Measurement
from splittune.report.capacity.progress import PlanCallback
from splittune.report.capacity.row import LargestMicroBatch, named_of
from splittune.runners.base import JobFacts
from splittune.runners.modelled_ranks.one_card import OneCardTrials
from splittune.runners.replay import Scripts
from splittune.runners.shapes import ShapeProfiler, ShapeRunner
from splittune.search import Trial
from splittune.split import BatchSplit
from splittune.training.said import each_said_once
from splittune.tuner import tune


def planned_searches(
    request: PlanRequest, callback: PlanCallback, storage: FinishedRows | None = None
) -> Iterator[PlannedSearch]:
    """The best split of each machine and batch size, given as soon as it is found.

    What `storage` has is not searched again. The job is left as it was found, also where this is ended early.
    """
    number = 0
    with each_said_once(), nullcontext() if storage is None else storage.alone():
        for sweep in _sweeps(request, callback, storage):
            for size in request.global_batch_sizes:
                number += 1
                callback.on_row(named_of(sweep.machine), size, number, request.num_searches)
                row = sweep.planned(size)
                callback.on_planned(row.as_row())
                yield row


def _sweeps(
    request: PlanRequest, callback: PlanCallback, storage: FinishedRows | None
) -> Iterator[_MachineSweep | RankSweep]:
    """One for each machine and strategy; those of a strategy share what they know of the job."""
    scripts, one_card = Scripts(), None
    for machine, hardware in zip(request.machines, request.hardware, strict=True):
        if machine.strategy == "dp":
            yield _MachineSweep(request, machine, hardware, scripts, storage, callback)
        else:
            one_card = one_card or OneCardTrials(request.task, hardware)
            yield RankSweep(request, machine, hardware, one_card, storage, callback)


@dataclass(slots=True)
class _MachineSweep:
    """The searches on one machine: they share a runner, and the largest micro-batch."""

    request: PlanRequest
    machine: Machine
    cards: VirtualHardware
    scripts: Scripts
    storage: FinishedRows | None
    callback: PlanCallback
    _runner: ShapeRunner = field(init=False)
    _identity: dict[str, Any] | None = field(default=None, init=False)
    _largest: LargestMicroBatch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._runner = ShapeRunner(self.request.task, self.cards, self.scripts)

    def planned(self, size: int | None) -> PlannedSearch:
        """The row of this batch size: kept from an earlier plan, or searched now and kept."""
        if self.storage is None:
            return self._searched(size)
        kept = self.storage.row(self._identity_of(size), lambda: self._searched(size))
        self._largest = self._largest or kept.largest
        return replace(kept, devices=self.machine.devices)

    def _searched(self, size: int | None) -> PlannedSearch:
        runner, trials = _AtBatchSize(self._runner, size), TrialKeeper(self.callback)
        try:
            result, lacking = tune(runner, self.request.options, trials), ""
        except NoFeasibleSplitError as error:
            result, lacking = None, str(error)
        assert runner.facts is not None, "the search opened it"
        facts = runner.facts
        if self._largest is None:
            self._largest = self._find_largest(trials.trials, facts)
        return PlannedSearch(
            devices=self.machine.devices,
            cards=self.machine.cards,
            global_batch_size=facts.loader_batch_size if size is None else size,
            result=result,
            lacking=lacking,
            trials=tuple(trials.trials),
            largest=_larger(self._largest, trials.trials),
            needs_values=self._runner.needs_values,
        )

    def _find_largest(self, trials: Sequence[Trial], facts: JobFacts) -> LargestMicroBatch | None:
        with _opened(self._runner):
            headroom = headroom_for(facts.cards, self.request.options.min_headroom_bytes)
            profiler = self._runner.profiler(min_headroom_bytes=headroom, loss_placement="output")

            def measure(split: BatchSplit) -> Measurement:
                self.callback.on_measure(split, in_whole_steps=False)
                return profiler.measure(split).judged(headroom)

            return largest_micro_batch(
                trials,
                measure if self._runner.needs_values is None else None,
                min_headroom_bytes=headroom,
                min_shard_size=MIN_BATCH_NORM_SHARD if facts.has_batch_norm else 0,
            )

    def _identity_of(self, size: int | None) -> dict[str, Any]:
        """What a row is kept under: whatever it depends on.

        Of the job that is its parameters and what one small step of it does on this machine: peaks and modelled time
        tell operations, shapes of the batch, loss, optimizer and model of time from others, and need none of their
        source. What they do not tell, a learning rate say, changes no row.
        """
        if self._identity is None:
            self._identity = self._job_on_machine()
        options = self.request.options
        return self._identity | {"global_batch_size": size, "max_trials": options.max_trials}

    def _job_on_machine(self) -> dict[str, Any]:
        with _opened(self._runner) as facts:
            headroom = headroom_for(facts.cards, self.request.options.min_headroom_bytes)
            each = MIN_BATCH_NORM_SHARD if facts.has_batch_norm else 1
            num_devices = len(self.cards.devices)
            split = BatchSplit(
                global_batch_size=each * num_devices, accumulation_steps=1, shard_sizes=(each,) * num_devices
            )
            profiler = self._runner.profiler(min_headroom_bytes=headroom, loss_placement="output")
            step = profiler.measure(split)
        named = self.request.task.model.named_parameters()
        return {
            "strategy": "dp",
            "machine": self.cards.spec,
            "versions": current_versions(),
            "title": facts.title,
            "loader_batch_size": facts.loader_batch_size,
            "parameters": [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in named],
            "step": step.to_dict(),
            "min_headroom_bytes": list(headroom),
        }


@contextmanager
def _opened(runner: ShapeRunner) -> Iterator[JobFacts]:
    try:
        yield runner.open(["output"])
    finally:
        runner.close()


@dataclass(slots=True)
class _AtBatchSize:
    """A runner whose job has another global batch: the runs of one machine then share what it knows."""

    runner: ShapeRunner
    global_batch_size: int | None
    facts: JobFacts | None = field(default=None, init=False)

    def open(self, placements: Sequence[LossPlacement]) -> JobFacts:
        facts = self.runner.open(placements)
        if self.global_batch_size is not None:
            facts = replace(facts, global_batch_size=self.global_batch_size)
        self.facts = facts
        return facts

    def profiler(self, *, min_headroom_bytes: Sequence[int], loss_placement: LossPlacement) -> ShapeProfiler:
        return self.runner.profiler(min_headroom_bytes=min_headroom_bytes, loss_placement=loss_placement)

    def close(self) -> None:
        self.runner.close()


def _larger(largest: LargestMicroBatch | None, trials: Sequence[Trial]) -> LargestMicroBatch | None:
    """The machine's largest, or a trial of this row that fitted and is larger still."""
    own = largest_micro_batch(trials, None, min_headroom_bytes=())
    if largest is None or (own is not None and own.num_samples > largest.num_samples):
        return own
    return largest
