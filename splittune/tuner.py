"""autotune(): from a model and a loader to the split to train with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn

from splittune.errors import ConfigError, NoFeasibleSplitError
from splittune.hardware import Hardware, resolve_hardware
from splittune.profiling.measurement import LossPlacement, Measurement
from splittune.profiling.profiler import Profiler
from splittune.progress import reporter_for
from splittune.results import SplitConfig, TuneResult
from splittune.search import SearchResult, Trial, find_best_split
from splittune.split import BatchSplit, SplitSpace
from splittune.training import TrainingTask, read_batches
from splittune.training.task import OptimizerLike, StepFunction

logger = logging.getLogger(__name__)

DEFAULT_MAX_TRIALS = 24
# Allocation patterns shift a little over days of training; what this keeps free is cheap beside a run that dies.
HEADROOM_FRACTION = 0.05
# Statistics over fewer samples than this are mostly noise, and over a single one BatchNorm refuses to train.
MIN_BATCH_NORM_SHARD = 4

LossPlacements = Literal["output", "replica", "either"]
Devices = str | Sequence[str | int | torch.device] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the caller says of the search, checked, in one piece; `autotune` documents each.

    Raises:
        ConfigError: a value of the wrong type or range.
    """

    min_headroom_bytes: int | Sequence[int] | None = None
    max_trials: int = DEFAULT_MAX_TRIALS
    timeout_s: float | None = None
    storage: str | os.PathLike[str] | None = None
    loss_placement: LossPlacements = "output"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_whole("seed", self.seed)
        if self.loss_placement not in get_args(LossPlacements):
            raise ConfigError(f"loss_placement is {self.loss_placement!r}: expected one of {get_args(LossPlacements)}.")

    @property
    def placements(self) -> tuple[LossPlacement, ...]:
        """The placements to search, each with its part of the trials and of the time."""
        return ("output", "replica") if self.loss_placement == "either" else (self.loss_placement,)

    @property
    def max_trials_each(self) -> int:
        return self.max_trials if len(self.placements) == 1 else max(1, self.max_trials // 2)

    @property
    def timeout_each_s(self) -> float | None:
        return self.timeout_s if len(self.placements) == 1 or self.timeout_s is None else self.timeout_s / 2


class Observer(Protocol):
    """Is told what a search does, for people to watch."""

    def on_start(self, hardware: Hardware, space: SplitSpace, max_trials: int) -> None: ...

    def on_measure(self, split: BatchSplit, *, in_whole_steps: bool) -> None: ...

    def on_trial(self, trial: Trial) -> None: ...

    def on_end(self) -> None: ...


def autotune(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: OptimizerLike | None = None,
    step_fn: StepFunction | None = None,
    devices: Devices = None,
    global_batch_size: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    min_headroom_bytes: int | Sequence[int] | None = None,
    max_trials: int = DEFAULT_MAX_TRIALS,
    timeout_s: float | None = None,
    storage: str | os.PathLike[str] | None = None,
    loss_placement: LossPlacements = "output",
    seed: int = 0,
    progress: bool = True,
) -> TuneResult:
    """Find the split of the batch that trains fastest without running out of memory. Run it once, before training.

    Short trials of the real step are run on the devices: forward, backward, the optimizer's update. Afterwards model,
    optimizer, random number generators and loader are as they were found, also when an exception or Ctrl-C ends it.

    Args:
        model: the module to train, not wrapped.
        loader: gives the batches, and can be iterated over again; its batch size is the global batch.
        loss_fn: ``loss_fn(output, targets)``, a mean over samples. None: the model's output is a scalar or carries
            ``.loss``; else cross-entropy for integer targets, MSE for floats. What was inferred is logged.
        optimizer: an instance, or a callable from parameters to one; None assumes AdamW.
        step_fn: ``step_fn(model, batch) -> loss``, in place of all that.
        devices: None for all visible CUDA devices; ``["cuda:1", "cuda:0"]`` for these, the first being 'GPU 0'; a
            string such as ``"4xV100-16GB"`` for virtual GPUs.
        global_batch_size: samples behind one optimizer step, kept exactly; None for the loader's batch size.
        autocast_dtype: torch.bfloat16, say, for autocast around forward and loss.
        min_headroom_bytes: what every device must keep free at its peak, one number or one per device; None for 5 % of
            what other programs leave to this one.
        max_trials: splits to search at most. Up to four are measured again at the end.
        timeout_s: seconds after which no further split is searched.
        storage: a path where trials are kept; a search that was stopped goes on from there.
        loss_placement: "output" computes the loss from gathered outputs, as training loops do; "replica" in each replica,
            which unburdens GPU 0 and wants ``config.wrap(model, loss_fn)``; "either" searches both, half the trials each,
            and the config says which won.
        seed: for samplers that draw.
        progress: show what is being measured.

    Raises:
        NoFeasibleSplitError: nothing fits; the message says which device lacked how much.
        ConfigError, DeviceError: the job or the devices cannot be used.
    """
    task = TrainingTask(
        model,
        loader,
        loss_fn=loss_fn,
        optimizer=optimizer,
        step_fn=step_fn,
        autocast_dtype=autocast_dtype,
        global_batch_size=global_batch_size,
    )
    options = SearchOptions(
        min_headroom_bytes=min_headroom_bytes,
        max_trials=max_trials,
        timeout_s=timeout_s,
        storage=storage,
        loss_placement=loss_placement,
        seed=seed,
    )
    return tune(task, resolve_hardware(devices), options, reporter_for(progress))


def tune(task: TrainingTask, hardware: Hardware, options: SearchOptions, observer: Observer) -> TuneResult:
    """`autotune` for a task and hardware at hand: profile, search, confirm, and leave the job as it was found."""
    snapshot = task.snapshot()
    try:
        samples = read_batches(task.loader)
        if "replica" in options.placements:
            task.loss_in_replica(samples.batch)  # says so now if it cannot be
        space = _space_for(task, samples.loader_batch_size, len(hardware.devices))
        headroom = _headroom_for(hardware, options.min_headroom_bytes)
        observer.on_start(hardware, space, options.max_trials)
        trials: list[Trial] = []

        def on_trial(trial: Trial) -> None:
            trials.append(replace(trial, number=len(trials)))  # numbered through where there are two searches
            observer.on_trial(trials[-1])

        def search(placement: LossPlacement) -> SearchResult:
            profiler = Profiler(
                task, hardware, samples, snapshot, min_headroom_bytes=headroom, loss_placement=placement
            )

            def measure(split: BatchSplit) -> Measurement:
                observer.on_measure(split, in_whole_steps=False)
                return profiler.measure(split)

            def confirm(split: BatchSplit) -> Measurement:
                observer.on_measure(split, in_whole_steps=True)
                return profiler.measure_whole_steps(split)

            return find_best_split(
                space,
                measure,
                confirm=confirm,
                max_trials=options.max_trials_each,
                timeout_s=options.timeout_each_s,
                storage=options.storage,
                study_name=_study_name(task, hardware, placement),
                seed=options.seed,
                min_headroom_bytes=headroom,
                on_trial=on_trial,
            )

        found = replace(_best_of(search, options.placements), trials=tuple(trials))
    finally:
        try:
            hardware.recover()
        finally:
            snapshot.restore()
            snapshot.restore_gradients()
            observer.on_end()
    return _result_of(found, hardware, headroom, options.seed)


def _best_of(search: Callable[[LossPlacement], SearchResult], placements: Sequence[LossPlacement]) -> SearchResult:
    """The best over one search for each placement, beside the first one's baseline; one may find nothing that fits."""
    results: list[SearchResult] = []
    failures: list[NoFeasibleSplitError] = []
    for placement in placements:
        try:
            results.append(search(placement))
        except NoFeasibleSplitError as error:  # noqa: PERF203  two turns at most
            failures.append(error)
    if not results:
        raise failures[0]
    best = max((result.best for result in results), key=lambda measurement: measurement.throughput or 0.0)
    return replace(results[0], best=best)


def _study_name(task: TrainingTask, hardware: Hardware, placement: LossPlacement) -> str:
    """Names the job and its devices, so that a storage never answers for another one."""
    num_parameters = sum(parameter.numel() for parameter in task.model.parameters())
    cards = hardware.spec or "+".join(device.name for device in hardware.devices)
    autocast = "" if task.autocast_dtype is None else f" in {task.autocast_dtype}"
    loss = "" if placement == "output" else ", loss in the replicas"
    return f"{type(task.model).__name__} of {num_parameters} parameters{autocast}{loss} on {cards}"


def _space_for(task: TrainingTask, loader_batch_size: int, num_devices: int) -> SplitSpace:
    global_batch_size = loader_batch_size if task.global_batch_size is None else task.global_batch_size
    if global_batch_size != loader_batch_size:
        logger.warning(
            "global_batch_size is %d and the loader gives batches of %d: trials are made of its samples all the same, but "
            "training needs a loader of batch size %d.",
            global_batch_size,
            loader_batch_size,
            global_batch_size,
        )
    min_shard_size = 0
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.model.modules()):
        min_shard_size = min(MIN_BATCH_NORM_SHARD, global_batch_size // num_devices)
        logger.info("the model has BatchNorm: every device gets at least %d samples.", min_shard_size)
    return SplitSpace(global_batch_size=global_batch_size, num_devices=num_devices, min_shard_size=min_shard_size)


def _headroom_for(hardware: Hardware, min_headroom_bytes: int | Sequence[int] | None) -> tuple[int, ...]:
    if min_headroom_bytes is None:
        with hardware.metered():
            return tuple(int(HEADROOM_FRACTION * (m.total_bytes - m.outside_bytes)) for m in hardware.memory())
    num_devices = len(hardware.devices)
    demands = min_headroom_bytes if isinstance(min_headroom_bytes, Sequence) else [min_headroom_bytes] * num_devices
    if len(demands) != num_devices:
        raise ConfigError(
            f"min_headroom_bytes has {len(demands)} numbers for {num_devices} devices: give one for each device, or a "
            "single number for all."
        )
    for demand in demands:
        _check_whole("min_headroom_bytes", demand)
    return tuple(demands)


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name} is {value!r}: expected an integer of at least 0.")


def _result_of(found: SearchResult, hardware: Hardware, headroom: tuple[int, ...], seed: int) -> TuneResult:
    config = SplitConfig(
        split=found.best.split,
        devices=hardware.devices,
        virtual_spec=hardware.spec,
        is_modelled=hardware.is_modelled,
        min_headroom_bytes=headroom,
        planned_peak_reserved_bytes=tuple(memory.peak_reserved_bytes for memory in found.best.memory),
        loss_placement=found.best.loss_placement,
        throughput=found.best.throughput,
        step_time_s=found.best.step_time_s,
        seed=seed,
    )
    return TuneResult(
        best=found.best, baseline=found.baseline, trials=found.trials, config=config, stopped=found.stopped
    )
