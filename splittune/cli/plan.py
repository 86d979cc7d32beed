"""splittune plan: what machines and batch sizes would give, without a GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, cast

import typer

from splittune.cli.console import (
    EXIT_INTERRUPTED,
    console,
    log_above_the_bar,
    say,
    say_how_to_wrap,
    sigterm_as_exit,
    working,
)
from splittune.cli.options import JobArgument, QuietOption, StrategyOption, VerboseOption
from splittune.config.files import check_writable
from splittune.errors import ConfigError, NoFeasibleSplitError
from splittune.options import DEFAULT_MAX_TRIALS, StrategyChoice, strategies_of
from splittune.planning.request import PlanRequest, checked_machines, checked_request, checked_sizes
from splittune.planning.result import Plan, PlannedSearch
from splittune.planning.storage import FinishedRows
from splittune.planning.sweep import planned_searches
from splittune.report.capacity.console import files_line, show_capacity
from splittune.report.capacity.files import config_name, save_capacity
from splittune.report.capacity.progress import PlanProgress, SilentPlanCallback
from splittune.report.capacity.row import best_row
from splittune.training.load_task import load_task

STORAGE_FILE = "plan.json"

DevicesOption = Annotated[
    list[str],
    typer.Option("--devices", help='A machine of virtual GPUs, "4xRTX3090"; give it again for each further one.'),
]
BatchSizesOption = Annotated[
    str | None,
    typer.Option(
        "--global-batch-size",
        help='Samples behind one optimizer step: "64,128,256". Default: the loader\'s batch size.',
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for capacity.csv, the picture and the configs.")]
MaxTrialsOption = Annotated[int, typer.Option(min=1, help="Splits to search at most, for each machine and batch size.")]
HeadroomOption = Annotated[
    int | None, typer.Option(min=0, help="Bytes that every card must keep free. Default: 5 % of what others leave.")
]
StorageOption = Annotated[
    Path | None,
    typer.Option(help=f"File that keeps finished rows: the plan can go on later. Default: {STORAGE_FILE} in --out."),
]


def plan(
    job: JobArgument,
    devices: DevicesOption,
    global_batch_size: BatchSizesOption = None,
    out: OutOption = Path("runs/plan"),
    max_trials: MaxTrialsOption = DEFAULT_MAX_TRIALS,
    min_headroom_bytes: HeadroomOption = None,
    storage: StorageOption = None,
    strategy: StrategyOption = "dp",
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Plan your own job on machines that are not here: best split, speed and memory of each batch size."""
    sizes = None if global_batch_size is None else parse_sizes(global_batch_size)
    strategies_of(strategy)
    chosen = cast("StrategyChoice", strategy)
    machines = checked_machines(devices, chosen)
    checked_sizes(sizes, machines)
    check_writable(out)
    finished = FinishedRows(storage or out / STORAGE_FILE)
    log_above_the_bar(logging.WARNING if quiet else logging.INFO)
    with working(f"making the job of {job}", is_shown=not quiet):
        task = load_task(job)
    request = checked_request(
        task,
        devices,
        global_batch_sizes=sizes,
        splits=None,
        min_headroom_bytes=min_headroom_bytes,
        max_trials=max_trials,
        strategy=chosen,
    )
    sweep_and_save(request, finished, out, quiet=quiet, verbose=verbose)


def sweep_and_save(request: PlanRequest, finished: FinishedRows, out: Path, *, quiet: bool, verbose: bool) -> None:
    """Plan, show, and write the files; when it ends early, by Ctrl-C say, those of the finished rows.

    Raises:
        NoFeasibleSplitError: no split fits on any machine; the files are written all the same.
    """
    rows: list[PlannedSearch] = []
    callback = SilentPlanCallback() if quiet else PlanProgress(console, verbose=verbose)
    try:
        with sigterm_as_exit():
            for row in planned_searches(request, callback, finished):
                rows.append(row)  # noqa: PERF402  one by one: an interruption leaves what is there
    except BaseException as error:
        callback.on_finish()
        if rows:
            _show_and_save(rows, out, quiet=quiet)
            say(f"Finished before it ended: {len(rows)} of {request.num_searches}. The same command goes on there.")
        if isinstance(error, KeyboardInterrupt):
            say("Interrupted; the model is as it was.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise
    callback.on_finish()
    _show_and_save(rows, out, quiet=quiet)
    if all(row.result is None for row in rows):
        raise NoFeasibleSplitError(
            f"no split fits on any machine at any batch size. {rows[-1].lacking} What each lacked stands in "
            f"{out / 'capacity.csv'}."
        )


def parse_sizes(text: str) -> list[int]:
    """``"64,128"`` as ``[64, 128]``.

    Raises:
        ConfigError: an entry is no whole number of at least 1; the message names all that are not.
    """
    entries = [entry.strip() for entry in text.split(",")]
    wrong = [entry for entry in entries if not (entry.isascii() and entry.isdecimal() and int(entry))]
    if wrong:
        listed = ", ".join(map(repr, wrong))
        raise ConfigError(
            f"--global-batch-size is {text!r}: got {listed}, expected whole numbers of at least 1 with commas between, "
            "such as 64,128,256."
        )
    return [int(entry) for entry in entries]


def _show_and_save(rows: list[PlannedSearch], out: Path, *, quiet: bool) -> None:
    found = Plan.of(rows)
    show_capacity(found.rows, console)
    with working(f"writing the tables, pictures and report of {out}", is_shown=not quiet):
        written = save_capacity(found.rows, out)
    if found.needs_values is not None:
        say(f"note: trials ran on real tensors: {found.needs_values}")
    say(f"\n{files_line(out, written)}")
    best = best_row(found.rows)
    if best is not None:
        say("To train on real cards:")
        say(f'    config = splittune.SplitConfig.load("{out / (config_name(best) or "")}")')
        say_how_to_wrap(best.strategy, "cuda:0")
