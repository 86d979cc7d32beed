"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splittune.cli.ranks import checked_job

JobArgument = Annotated[
    str,
    # a path that is mistyped is told before anything else is looked at, devices above all
    typer.Argument(metavar="FILE.py:FUNCTION", help="FUNCTION() returns a TrainingTask.", callback=checked_job),
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for split.json, the tables and the explanation.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show why each split was tried, and the whole explanation.")
]
StrategyOption = Annotated[
    str,
    typer.Option(
        help='"dp": one process with a replica on each card; "ddp": a process for each card, on one machine or many; '
        '"either": both, side by side.'
    ),
]
