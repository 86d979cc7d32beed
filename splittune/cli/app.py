"""The command line: its commands, and the codes it exits with."""

from __future__ import annotations

import traceback
from functools import partial

import typer

from splittune.cli.console import EXIT_BAD_USAGE, EXIT_JOB_FAILED, EXIT_NO_FEASIBLE_SPLIT, say_error
from splittune.cli.demo import demo
from splittune.cli.devices import devices
from splittune.cli.export import export
from splittune.cli.plan import plan
from splittune.cli.ranks import leave
from splittune.cli.report import report
from splittune.cli.tune import tune
from splittune.cli.verify import verify
from splittune.errors import JobError, NoFeasibleSplitError, RanksError, SplittuneError, WorkerError

app = typer.Typer(
    help="Finds the batch split that trains fastest without running out of memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (tune, plan, verify, report, export, demo, devices):
    app.command()(command)


def main() -> None:
    """Run the command line.

    Exit 0: done; 1: no feasible split, or not verified; 2: bad usage; 3: the job raised, or the function
    that makes it; 130 and 143: interrupted, by Ctrl-C or SIGTERM.
    """
    try:
        app()
    except Exception as error:  # noqa: BLE001  the user's own: as Python shows it, but not with code 1
        leave(error, _code_of(error), partial(_show, error))


def _code_of(error: Exception) -> int:
    if isinstance(error, NoFeasibleSplitError):
        return EXIT_NO_FEASIBLE_SPLIT
    if isinstance(error, JobError) and not isinstance(error.__cause__, SplittuneError):
        return EXIT_JOB_FAILED
    if isinstance(error, SplittuneError) and not isinstance(error, WorkerError | RanksError):
        return EXIT_BAD_USAGE
    return EXIT_JOB_FAILED


def _show(error: Exception) -> None:
    """Say what went wrong on standard error, an exception of the user's with its traceback."""
    cause = error.__cause__ if isinstance(error, SplittuneError) else error
    is_the_jobs = isinstance(error, JobError) or not isinstance(error, SplittuneError)
    says_all = isinstance(error, NoFeasibleSplitError | WorkerError | RanksError) or isinstance(cause, OSError)
    if cause is not None and not isinstance(cause, SplittuneError) and (is_the_jobs or not says_all):
        traceback.print_exception(cause)
    if isinstance(error, SplittuneError):
        say_error(error)
