"""splittune export: a config in the words of the tool that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splittune.cli.console import say, working
from splittune.cli.options import QuietOption
from splittune.exports import TOOLS, export_saved

FolderArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The folder that tune wrote, or a config in it.")
]
ToOption = Annotated[str, typer.Option("--to", help=f"The tool: {', '.join(TOOLS)}.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="The file to write. Default: the tool's own, in FOLDER.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]


def export(
    folder: FolderArgument,
    to: ToOption,
    out: OutOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write what a tool reads: the winner where it takes unequal shares, else the fastest even split tried."""
    with working(f"reading {folder} and its trials", is_shown=not quiet):
        made = export_saved(folder, to)
    path = out or (folder if folder.is_dir() else folder.parent) / made.file_name
    made.save(path, force=force)
    say(f"Written to {path}, tried with {made.tool.distribution} {made.tool.tried_with}.")
    for note in (*made.notes, made.tool.about_installed()):
        if note:
            say(f"  {note}")
