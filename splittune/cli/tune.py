"""splittune tune: the fastest split for a job of the user's own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from splittune.advice import Job, SourceJob, TaskJob
from splittune.advice import advise as add_advice
from splittune.cards import kind_of_cards
from splittune.cli.console import (
    EXIT_INTERRUPTED,
    console,
    log_above_the_bar,
    say,
    say_how_to_wrap,
    sigterm_as_exit,
    working,
)
from splittune.cli.options import JobArgument, OutOption, QuietOption, StrategyOption, VerboseOption
from splittune.cli.ranks import LIMIT_NAME, as_rank, check_strategy, launch_this
from splittune.collective import tune_together
from splittune.config.files import check_writable
from splittune.errors import ConfigError, NoFeasibleSplitError
from splittune.hardware import resolve_hardware
from splittune.hardware.cuda import count_visible_devices
from splittune.modelled_ddp import tune_by_strategy, virtual_cards
from splittune.options import (
    DEFAULT_MAX_TRIALS,
    LossPlacements,
    SearchOptions,
    SharesChoice,
    StrategyChoice,
    strategies_of,
)
from splittune.profiling.measurement import Outcome
from splittune.report import TuneResult, save_tables
from splittune.report.console import show_notes, show_result
from splittune.report.files import CONFIG_FILE
from splittune.report.page import save_tables_report
from splittune.report.progress import ConsoleCallback, SilentCallback
from splittune.runners.base import DeviceSnapshot, Runner
from splittune.runners.in_process import InProcessRunner
from splittune.runners.launch.attempts import Attempts, NotingJournal
from splittune.runners.launch.place import Place, place_of, refuse_nested
from splittune.runners.launch.rank import ARRIVAL_S, GRACE_S, at_most
from splittune.runners.ranks.journal import TrialJournal
from splittune.runners.worker.runner import DEFAULT_TRIAL_TIMEOUT_S, MAX_ENDS_IN_A_ROW, WorkerRunner
from splittune.search import DEFAULT_SAMPLER, SAMPLER_NAMES, Trial
from splittune.split import SplitSpace
from splittune.training import TrainingTask
from splittune.training.load_task import load_task
from splittune.tuner import TuneCallback
from splittune.tuner import tune as run_search

logger = logging.getLogger(__name__)

# Where a search that ended early puts its tables if the folder it was given has an earlier search's config.
UNFINISHED = "unfinished"

Isolation = Literal["auto", "process", "none"]

DevicesOption = Annotated[
    str | None, typer.Option(help='"cuda:1,cuda:0", or virtual GPUs: "4xV100-16GB". Default: all visible CUDA devices.')
]
BatchSizeOption = Annotated[
    int | None, typer.Option(help="Samples behind one optimizer step. Default: the loader's batch size.")
]
MaxTrialsOption = Annotated[int, typer.Option(min=1, help="Splits to search at most.")]
TimeoutOption = Annotated[float | None, typer.Option(help="Seconds after which no further split is searched.")]
HeadroomOption = Annotated[
    int | None, typer.Option(min=0, help="Bytes that every card must keep free. Default: 5 % of what others leave.")
]
StorageOption = Annotated[str | None, typer.Option(help="File that keeps the trials: the search can go on later.")]
LossOption = Annotated[
    LossPlacements, typer.Option(help='Compute the loss in each "replica" instead of from gathered outputs.')
]
SharesOption = Annotated[
    SharesChoice,
    typer.Option(
        help='"gpu0": GPU 0\'s share, the rest even; "each": every card its own; "auto": by how alike they are.'
    ),
]
SamplerOption = Annotated[str, typer.Option(help=f"One of {', '.join(SAMPLER_NAMES)}.")]
IsolationOption = Annotated[
    Isolation,
    typer.Option(
        help='"process": trials run in a process of their own, which may crash or hang without ending the search; '
        '"none": in this one; "auto": the first on CUDA devices, the second on virtual ones.'
    ),
]
TrialTimeoutOption = Annotated[
    float, typer.Option(help="Seconds after which a trial in a process of its own counts as hung.")
]
AdviseOption = Annotated[
    bool, typer.Option("--advise", help="Then try what may help beside the split, in about as much time again.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="For whatever is drawn at random.")]


def tune(
    job: JobArgument,
    devices: DevicesOption = None,
    global_batch_size: BatchSizeOption = None,
    out: OutOption = Path("runs/split"),
    max_trials: MaxTrialsOption = DEFAULT_MAX_TRIALS,
    timeout_s: TimeoutOption = None,
    min_headroom_bytes: HeadroomOption = None,
    storage: StorageOption = None,
    loss_placement: LossOption = "output",
    shares: SharesOption = "auto",
    strategy: StrategyOption = "dp",
    sampler: SamplerOption = DEFAULT_SAMPLER,
    isolation: IsolationOption = "auto",
    trial_timeout_s: TrialTimeoutOption = DEFAULT_TRIAL_TIMEOUT_S,
    seed: SeedOption = 0,
    advise: AdviseOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Find the fastest split for your own job, and write the config to train with."""
    place = place_of()
    if place is None:
        check_writable(out)
    else:
        check_strategy(place, strategy)
        if isolation == "process" and place.folder is None:
            refuse_nested(place, "--isolation process")
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
    if advise and (place is not None or strategies_of(strategy) != ("dp",)):
        raise ConfigError("--advise is for a search in one process, --strategy dp: leave it out.")
    search: Callable[[TuneCallback], TuneResult]
    making = f"making the job of {job}"
    job_at_hand: Job | None = None
    if place is not None:
        make_task = partial(_task_of, job, global_batch_size)
        with as_rank(place, on_cards=names_cuda_devices(devices), trial_timeout_s=trial_timeout_s, quiet=quiet):
            search = _search_as_rank(place, make_task, devices, options, trial_timeout_s, out)
            if place.is_first:
                saving = at_most(trial_timeout_s)  # a disk that hangs holds up the launch as a trial does
                result = tune_and_save(search, out, quiet=quiet, verbose=verbose, while_saving=saving)
                _show_end(result, out, verbose=verbose)
            else:
                search(SilentCallback())
        return
    if strategies_of(strategy) == ("dp",):
        with working(making, is_shown=not quiet):
            runner, job_at_hand = _runner_for(job, devices, global_batch_size, isolation, trial_timeout_s)
        search = partial(run_search, runner, options)
    elif strategy == "ddp" and (isolation == "process" or (isolation == "auto" and names_cuda_devices(devices))):
        launch_this(num_cards(devices), max_restarts=MAX_ENDS_IN_A_ROW * (max_trials + 1))
    else:
        chosen = cast("StrategyChoice", strategy)
        cards = virtual_cards(devices, chosen)
        with working(making, is_shown=not quiet):
            task = _task_of(job, global_batch_size)
        search = partial(tune_by_strategy, task, cards, options, strategy=chosen)
    result = tune_and_save(search, out, quiet=quiet, verbose=verbose)
    if advise:
        made = job_at_hand or _source_job(job, result, global_batch_size, trial_timeout_s)
        result = add_advice(result, made, options, say=(lambda _: None) if quiet else say)
        result.save(out)
    _show_end(result, out, verbose=verbose)


def _show_end(result: TuneResult, out: Path, *, verbose: bool) -> None:
    """Show the result, and how to train under it."""
    show_result(result, console, verbose=verbose)
    say(f"\nSaved in {out}: split.json, report.html (open it in a browser), trials.csv, devices.csv,")
    is_virtual = result.config.virtual_spec is not None
    where = " on real cards" if is_virtual else ""  # without their names the config trains on the virtual ones again
    say(f"explanation.txt, result.json{', advice.csv' if result.advice else ''}. To train{where}:")
    say(f'    config = splittune.SplitConfig.load("{out / "split.json"}")')
    say_how_to_wrap(result.config.strategy, "cuda:0" if is_virtual else None)
    show_notes(result, console)


def tune_and_save(
    search: Callable[[TuneCallback], TuneResult],
    out: Path,
    *,
    quiet: bool,
    verbose: bool,
    log_level: int = logging.INFO,
    while_saving: AbstractContextManager[None] | None = None,
) -> TuneResult:
    """Search and write the files, `while_saving` entered for the latter; log from `log_level` up, if not `quiet`.

    When it ends early, by Ctrl-C say, the finished trials are written all the same: into `out`, or
    into a folder in it where `out` has the config of an earlier search.
    """
    starting = ExitStack()
    callback = _KeepingCallback(SilentCallback() if quiet else ConsoleCallback(console, verbose=verbose), starting)
    log_above_the_bar(logging.WARNING if quiet else log_level)
    try:
        with sigterm_as_exit(), starting:
            starting.enter_context(working("making the job, and reading a batch", is_shown=not quiet))
            result = search(callback)
    except BaseException as error:
        if callback.cards is not None and callback.trials:
            cards = callback.cards
            if (out / CONFIG_FILE).exists():  # of an earlier search, whose tables belong to it
                out = out / UNFINISHED
            save_tables(out, callback.trials, cards.devices, is_modelled=cards.is_modelled, nodes=cards.nodes)
            say(f"Finished trials kept in {out}/trials.csv: {len(callback.trials)}.")
            fits = any(trial.measurement.outcome is Outcome.OK for trial in callback.trials)
            if fits or isinstance(error, NoFeasibleSplitError):
                say(f"What was tried: {save_tables_report(out)}")
        if isinstance(error, KeyboardInterrupt):
            say("Interrupted; the model is as it was. With --storage FILE a search goes on where it stopped.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise
    with while_saving or nullcontext(), working(f"writing the tables and report of {out}", is_shown=not quiet):
        result.save(out)
    return result


def _search_as_rank(
    place: Place,
    make_task: Callable[[], TrainingTask],
    devices: str | None,
    options: SearchOptions,
    trial_timeout_s: float,
    out: Path,
) -> Callable[[TuneCallback], TuneResult]:
    """The search together with the other ranks, kept in a file for as long as the launch lasts."""
    journal: TrialJournal | None = None
    if place.folder is not None:
        options = dataclasses.replace(options, storage=options.storage or str(place.folder / "trials"))
        if place.is_first:
            attempts = Attempts(place.folder)
            journal = NotingJournal(f"{options.storage}.trial", attempts)
            if place.num_starts:
                logger.warning("The ranks were started again: %s.", attempts.last_end(LIMIT_NAME))
    return partial(
        tune_together,
        make_task,
        devices,
        options,
        arrival_timeout_s=ARRIVAL_S,
        wait_s=trial_timeout_s + GRACE_S,
        journal=journal,
        check_first=partial(check_writable, out),
        end_after_s=trial_timeout_s,
    )


def _runner_for(
    job: str, devices: str | None, global_batch_size: int | None, isolation: Isolation, trial_timeout_s: float
) -> tuple[Runner, Job | None]:
    """Where the trials run: in a process of their own, or in this one, which then has the job at hand."""
    if isolation == "process" or (isolation == "auto" and names_cuda_devices(devices)):
        return WorkerRunner(job, devices, global_batch_size=global_batch_size, trial_timeout_s=trial_timeout_s), None
    hardware, task = resolve_hardware(devices), _task_of(job, global_batch_size)
    return InProcessRunner(task, hardware), TaskJob(task, hardware)


def _source_job(job: str, result: TuneResult, global_batch_size: int | None, trial_timeout_s: float) -> Job:
    """The job as a worker builds it, on the cards of the search."""
    return SourceJob(
        job,
        result.config.devices,
        result.config.virtual_spec,
        global_batch_size=global_batch_size,
        trial_timeout_s=trial_timeout_s,
    )


def _task_of(job: str, global_batch_size: int | None) -> TrainingTask:
    task = load_task(job)
    return task if global_batch_size is None else dataclasses.replace(task, global_batch_size=global_batch_size)


def num_cards(devices: str | None) -> int:
    """How many cards these are; asking makes no context on them."""
    if names_cuda_devices(devices):
        return count_visible_devices() if devices is None else len(devices.split(","))
    return len(resolve_hardware(devices).devices)


def names_cuda_devices(devices: str | None) -> bool:
    """Whether trials are to run on CUDA devices that are there; asking makes no context on them."""
    names = [] if devices is None else [name.strip().partition(":")[0] for name in devices.split(",")]
    return all(name == kind_of_cards() or name.isdecimal() for name in names) and count_visible_devices() > 0


class _KeepingCallback:
    """Passes everything on, and keeps the finished trials and what they ran on; `starting` ends with the start."""

    def __init__(self, callback: TuneCallback, starting: ExitStack) -> None:
        self._starting = starting
        self.trials: list[Trial] = []
        self.cards: DeviceSnapshot | None = None
        self.on_measure = callback.on_measure
        self.on_activity = callback.on_activity
        self.on_end = callback.on_end
        self._callback = callback

    def on_start(self, cards: DeviceSnapshot, space: SplitSpace, max_trials: int) -> None:
        self.cards = cards
        self._starting.close()
        self._callback.on_start(cards, space, max_trials)

    def on_trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._callback.on_trial(trial)
