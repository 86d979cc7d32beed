"""splittune report: report.html of a folder that a search or a plan has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splittune.cli.console import say
from splittune.report.page import save_report

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="What tune or plan wrote, such as runs/split.")]


def report(folder: FolderArgument) -> None:
    """Write report.html into the folder of a search or a plan, from the files that lie there."""
    say(f"Written: {save_report(folder)}. Any browser opens it; nothing is fetched.")
