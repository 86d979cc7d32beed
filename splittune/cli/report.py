"""splittune report: report.html of a folder that a search or a plan has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splittune.cli.console import say, working
from splittune.cli.options import QuietOption
from splittune.report.page import save_report

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="What tune or plan wrote, such as runs/split.")]


def report(folder: FolderArgument, quiet: QuietOption = False) -> None:
    """Write report.html into the folder of a search or a plan, from the files that lie there."""
    with working(f"reading {folder}, and drawing its report", is_shown=not quiet):
        written = save_report(folder)
    say(f"Written: {written}. Any browser opens it; nothing is fetched.")
