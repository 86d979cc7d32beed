"""autotune(): from a model and a loader to the split to train with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from splittune.config import SplitConfig
from splittune.config.data import Strategy
from splittune.errors import ConfigError, NoFeasibleSplitError
from splittune.foretelling import foretell_beside
from splittune.hardware import resolve_hardware
from splittune.options import (
    DEFAULT_MAX_TRIALS,
    LossPlacements,
    SearchOptions,
    SharesChoice,
    StrategyChoice,
    headroom_for,
    space_for,
    strategies_of,
)
from splittune.profiling.drift import anchored
from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import LossPlacement, Measurement
from splittune.report import TuneResult
from splittune.report.progress import callback_for, lines_for
from splittune.report.state_parts import model_bytes_of
from splittune.runners.base import DeviceSnapshot, JobFacts, Runner
from splittune.runners.in_process import InProcessRunner
from splittune.runners.worker.runner import DEFAULT_TRIAL_TIMEOUT_S, JobSource, WorkerRunner
from splittune.search import DEFAULT_SAMPLER, SearchResult, Trial, find_best_split
from splittune.split import BatchSplit, SplitSpace
from splittune.training import TrainingTask
from splittune.training.loader_rate import describe_slow_loader
from splittune.training.mean_loss import describe_sum
from splittune.training.task import OptimizerLike, StepFunction

logger = logging.getLogger(__name__)

_LEFT_OUT = 'of loss_placement="either", %r is left out: %s'
Devices = str | Sequence[str | int | torch.device] | None


class TuneCallback(Protocol):
    """Is told what a search does."""

    def on_start(self, cards: DeviceSnapshot, space: SplitSpace, max_trials: int) -> None: ...

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None: ...

    def on_trial(self, trial: Trial) -> None: ...

    def on_activity(self, what: str) -> None: ...

    def on_end(self) -> None: ...


def autotune(
    model: nn.Module | TrainingTask | JobSource,
    loader: Iterable[Any] | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: OptimizerLike | None = None,
    step_fn: StepFunction | None = None,
    devices: Devices = None,
    global_batch_size: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    other_state: Sequence[object] = (),
    min_headroom_bytes: int | Sequence[int] | None = None,
    max_trials: int = DEFAULT_MAX_TRIALS,
    timeout_s: float | None = None,
    storage: str | os.PathLike[str] | None = None,
    loss_placement: LossPlacements = "output",
    shares: SharesChoice = "auto",
    strategy: StrategyChoice = "dp",
    sampler: str = DEFAULT_SAMPLER,
    seed: int = 0,
    isolation: Literal["process"] | None = None,
    trial_timeout_s: float = DEFAULT_TRIAL_TIMEOUT_S,
    advise: bool = False,
    progress: bool = True,
) -> TuneResult:
    """Find the split of the batch that trains fastest without running out of memory. Run it once, before training.

    Short trials of the real step are run on the devices: forward, backward, the optimizer's update. Afterwards model,
    optimizer, random number generators and loader are as they were found, also when an exception or Ctrl-C ends it.

    After a search on real cards the best split and the baseline are foretold on virtual ones of the same kinds, in 30
    seconds at most: `TuneResult.foretold`.

    Args:
        model: the module to train, not wrapped, or a `TrainingTask`, which holds loader, loss and the
            like as well; with ``isolation="process"`` what makes the whole job instead, a function
            without arguments that returns a `TrainingTask`, or ``"FILE.py:FUNCTION"``.
        loader: gives the batches, and can be iterated over again; its batch size is the global batch.
        loss_fn: ``loss_fn(output, targets)``, a mean over samples. None: the model's output is a scalar or carries
            ``.loss``; else cross-entropy for integer targets, MSE for floats. What was inferred is logged.
        optimizer: an instance, or a callable from parameters to one; None assumes AdamW.
        step_fn: ``step_fn(model, batch) -> loss``, in place of all that.
        devices: None for all visible CUDA devices; ``["cuda:1", "cuda:0"]`` for these, the first being 'GPU 0'; a
            string such as ``"4xV100-16GB"`` for virtual GPUs, over which the job really trains, on the CPU: a
            rehearsal. A model that is too large for that is for `plan`, which needs its shapes alone.
        global_batch_size: samples behind one optimizer step, kept exactly; None for the loader's batch size.
        autocast_dtype: torch.bfloat16, say, for autocast around forward and loss.
        grad_scaler: scales losses and takes the optimizer's steps, as in training with float16.
        other_state: what else training changes, beyond what `step_fn` and `loss_fn` reach: other
            models, their optimizers.
        min_headroom_bytes: what every device must keep free at its peak, one number or one per device; None for 5 % of
            what other programs leave to this one.
        max_trials: splits to search at most. Up to four are measured again at the end.
        timeout_s: seconds after which no further split is searched.
        storage: a path where trials are kept; a search that was stopped goes on from there.
        loss_placement: "output" computes the loss from gathered outputs, as training loops do;
            "replica" in each replica, which unburdens GPU 0 and wants ``config.wrap(model,
            loss_fn)``; "either" searches both, half the trials each, and the config says which won.
        shares: "gpu0" searches GPU 0's share and spreads the rest evenly, "each" every card's own;
            "auto" takes the first where the other cards are alike, the second where they are not.
        strategy: "dp" for one process with a replica on each card; "ddp" for a rank of DistributedDataParallel for
            each. Called on every rank of a process group, with "ddp", it is a collective: each rank measures its own
            card, the real one of its LOCAL_RANK or its place among virtual ones, and all have the same result. In one
            process, on virtual cards, "ddp" models the ranks, and "either" gives the faster of both.
        sampler: "guided" by models of memory and time, which provokes no OOM that they can foresee;
            "tpe", "gp", "random" and "grid" are there to compare.
        seed: for samplers that draw.
        isolation: None runs the trials in this process. "process" runs them in another, which makes
            the job anew: one that is killed, aborts or hangs is a crashed trial, and the search
            goes on. This process then touches no device.
        trial_timeout_s: seconds after which a trial in a process of its own counts as hung; those
            in whole steps may take as many times that as they accumulate. On ranks, for how long any of them waits for
            the others at most.
        advise: after the search try what may help beside the split, in about as much time again: `TuneResult.advice`.
            For "dp" alone.
        progress: show what is being measured.

    Raises:
        NoFeasibleSplitError: nothing fits; the message says which device lacked how much.
        ConfigError, DeviceError: the job or the devices cannot be used.
        WorkerError: the process that runs the trials could not be kept alive.
        RanksError: a rank was lost, or has not come in time.
    """
    parts: dict[str, Any] = {
        "loader": loader,
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "step_fn": step_fn,
        "autocast_dtype": autocast_dtype,
        "grad_scaler": grad_scaler,
        "other_state": other_state,
    }
    options = SearchOptions(
        min_headroom_bytes=min_headroom_bytes,
        max_trials=max_trials,
        timeout_s=timeout_s,
        storage=storage,
        loss_placement=loss_placement,
        shares=shares,
        sampler=sampler,
        seed=seed,
    )

    def make_task() -> TrainingTask:
        if isinstance(model, TrainingTask):
            _refuse_parts(parts, "a TrainingTask, which holds its own: expected that alone, autotune(task, ...)")
            return model if global_batch_size is None else replace(model, global_batch_size=global_batch_size)
        module: Any = model  # what is none is refused by TrainingTask
        return TrainingTask(module, **parts, global_batch_size=global_batch_size)

    if strategies_of(strategy) != ("dp",):
        if advise:
            raise ConfigError(f'advise is set with strategy="{strategy}": expected "dp". Leave advise out.')
        if isolation is not None:
            raise ConfigError(
                f'isolation is {isolation!r} with strategy="{strategy}": expected None, for this process.'
            )
        # imported late: it stands on this module
        from splittune.collective import is_collective, is_leader, tune_together
        from splittune.modelled_ddp import tune_by_strategy, virtual_cards

        if is_collective():
            callback = callback_for(progress and is_leader())
            result = tune_together(make_task, devices, options, callback, strategy=strategy, wait_s=trial_timeout_s)
            if not is_leader():  # the notes are said once
                return result
        else:
            hardware = virtual_cards(devices, strategy)
            result = tune_by_strategy(make_task(), hardware, options, callback_for(progress), strategy=strategy)
    else:
        # imported late: it stands on this module's floor, and runs searches of its own
        from splittune.advice import SourceJob, TaskJob
        from splittune.advice import advise as add_advice

        runner: Runner
        if isolation == "process":
            _refuse_parts(
                parts,
                'isolation="process", which makes the job anew in another process: expected a function alone, '
                "autotune(make_task, ...), whose TrainingTask holds them",
            )
            source: Any = model  # what is here already is refused
            runner = WorkerRunner(source, devices, global_batch_size=global_batch_size, trial_timeout_s=trial_timeout_s)
        elif isolation is None:
            task = make_task()
            at_hand = TaskJob(task, resolve_hardware(devices))
            runner = InProcessRunner(task, at_hand.hardware)
        else:
            raise ConfigError(f'isolation is {isolation!r}: expected None, for this process, or "process".')
        result = tune(runner, options, callback_for(progress))
        if advise:
            job = (
                at_hand
                if isolation is None
                else SourceJob(
                    source,
                    result.config.devices,
                    result.config.virtual_spec,
                    global_batch_size=global_batch_size,
                    trial_timeout_s=trial_timeout_s,
                )
            )
            result = add_advice(result, job, options, say=lines_for(progress))
    for note in result.notes:  # a script that goes straight on to training shows nothing of the result
        logger.warning(note)
    return result


def tune(runner: Runner, options: SearchOptions, callback: TuneCallback, *, strategy: Strategy = "dp") -> TuneResult:
    """`autotune` for a job wherever its trials run: profile, search, confirm, and leave the job as it was found.

    On real cards the winner and the baseline are then foretold as a plan would have it, to be compared.
    """
    try:
        job = runner.open(options.placements)
        if job.no_replica_loss is not None:
            logger.warning(_LEFT_OUT, "replica", job.no_replica_loss)
            options = replace(options, loss_placement="output")
        space = space_for(job, options.shares)
        headroom = headroom_for(job.cards, options.min_headroom_bytes)
        callback.on_start(job.cards, space, options.max_trials)
        trials: list[Trial] = []

        def on_trial(trial: Trial) -> None:
            trials.append(replace(trial, number=len(trials)))  # numbered through where there are two searches
            callback.on_trial(trials[-1])

        def search(placement: LossPlacement) -> SearchResult:
            profiler = runner.profiler(min_headroom_bytes=headroom, loss_placement=placement)

            def measure(split: BatchSplit) -> Measurement:
                callback.on_measure(split, in_whole_steps=False)
                return profiler.measure(split)

            def confirm(split: BatchSplit) -> Measurement:
                callback.on_measure(split, in_whole_steps=True)
                return profiler.measure_whole_steps(split)

            return find_best_split(
                space,
                anchored(measure, is_modelled=job.cards.is_modelled),
                confirm=confirm,
                max_trials=options.max_trials_each,
                timeout_s=options.timeout_each_s,
                storage=options.storage,
                study_name=_study_name(job, placement, strategy),
                seed=options.seed,
                sampler=options.sampler,
                min_headroom_bytes=headroom,
                on_trial=on_trial,
            )

        found = replace(_best_of(search, options.placements), trials=tuple(trials))
        foretold = foretell_beside(runner, job, found, callback.on_activity)
    finally:
        try:
            runner.close()
        finally:
            callback.on_end()
    return result_of(found, job, headroom, seed=options.seed, foretold=foretold, strategy=strategy)


def _best_of(search: Callable[[LossPlacement], SearchResult], placements: Sequence[LossPlacement]) -> SearchResult:
    """The best over one search for each placement, beside the first one's baseline; one may find nothing that fits.

    Of two placements one that cannot be run is left out, with a word.
    """
    results: list[SearchResult] = []
    failures: list[NoFeasibleSplitError | ConfigError] = []
    for placement in placements:
        try:
            results.append(search(placement))
        except NoFeasibleSplitError as error:  # noqa: PERF203  two turns at most
            failures.append(error)
        except ConfigError as error:
            if len(placements) > 1:
                logger.warning(_LEFT_OUT, placement, error)
            failures.append(error)
    if not results:
        raise failures[0]
    best = max((result.best for result in results), key=lambda measurement: measurement.throughput or 0.0)
    warnings = dict.fromkeys(warning for result in results for warning in result.warnings)
    return replace(results[0], best=best, warnings=tuple(warnings))


def _study_name(job: JobFacts, placement: LossPlacement, strategy: Strategy) -> str:
    """Names the job and its devices, so that a storage never answers for another one."""
    cards = job.cards.spec or "+".join(device.name for device in job.cards.devices)
    loss = "" if placement == "output" else ", loss in the replicas"
    return f"{job.title}{loss} on {'ranks with ' if strategy == 'ddp' else ''}{cards}"


def _refuse_parts(parts: dict[str, Any], beside: str) -> None:
    given = [name for name, part in parts.items() if part is not None and not _is_empty(part)]
    if given:
        raise ConfigError(f"got {', '.join(given)} with {beside}.")


def _is_empty(part: object) -> bool:
    return isinstance(part, tuple) and not part


def result_of(
    found: SearchResult,
    job: JobFacts,
    headroom: tuple[int, ...],
    *,
    seed: int,
    foretold: Foretold | None = None,
    strategy: Strategy = "dp",
) -> TuneResult:
    """What `autotune` returns of a finished search, with the config to train with."""
    cards, throughput, rate = job.cards, found.best.throughput, job.loader_samples_per_s
    slow = None if rate is None or throughput is None else describe_slow_loader(job.loader_advice, rate, throughput)
    config = SplitConfig(
        split=found.best.split,
        devices=cards.devices,
        virtual_spec=cards.spec,
        is_modelled=cards.is_modelled,
        min_headroom_bytes=headroom,
        planned_peak_reserved_bytes=tuple(memory.peak_reserved_bytes for memory in found.best.memory),
        loss_placement=found.best.loss_placement,
        strategy=strategy,
        throughput=found.best.throughput,
        step_time_s=found.best.step_time_s,
        seed=seed,
    )
    no_mean = describe_sum(found.best.loss_exponent)
    return TuneResult(
        best=found.best,
        baseline=found.baseline,
        trials=found.trials,
        config=config,
        stopped=found.stopped,
        warnings=found.warnings,
        notes=tuple(note for note in (no_mean, slow) if note is not None),
        foretold=foretold,
        nodes=job.nodes,
        job=job.title,
        model=model_bytes_of(job.parameter_bytes, job.gradient_bytes),
        modules=job.modules,
    )
