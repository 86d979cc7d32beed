"""The command line: its commands, and the codes it exits with."""

from __future__ import annotations

import sys
import traceback

import typer

from splittune.cli.console import EXIT_BAD_USAGE, EXIT_JOB_FAILED, EXIT_NO_FEASIBLE_SPLIT, fail
from splittune.cli.demo import demo
from splittune.cli.devices import devices
from splittune.cli.export import export
from splittune.cli.plan import plan
from splittune.cli.report import report
from splittune.cli.tune import tune
from splittune.cli.verify import verify
from splittune.errors import NoFeasibleSplitError, SplittuneError, WorkerError

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

    Exit 0: done; 1: no feasible split, or not verified; 2: bad usage; 3: the job raised; 130 and
    143: interrupted, by Ctrl-C or SIGTERM.
    """
    try:
        app()
    except NoFeasibleSplitError as error:
        fail(error, EXIT_NO_FEASIBLE_SPLIT)
    except WorkerError as error:
        fail(error, EXIT_JOB_FAILED)
    except SplittuneError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, SplittuneError | OSError):
            traceback.print_exception(error.__cause__)
        fail(error, EXIT_BAD_USAGE)
    except Exception:  # noqa: BLE001  the user's own: as Python shows it, but not with code 1
        traceback.print_exc()
        sys.exit(EXIT_JOB_FAILED)
