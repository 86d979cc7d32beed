"""report.html in the folder of a search or of a plan, made from the files that lie there."""

from __future__ import annotations

import os
from pathlib import Path

from splittune.config.files import write_atomically
from splittune.report.files import CAPACITY_FILE, REPORT_FILE, TRIALS_FILE
from splittune.report.page.of_tables import page_of_tables
from splittune.report.page.planned import plan_page, read_modules, read_plan
from splittune.report.page.source import read_search, read_tables
from splittune.report.page.tuned import search_page


def save_report(folder: str | os.PathLike[str]) -> Path:
    """Write the ``report.html`` of a search, or of a plan, from the other files of `folder`.

    The same files give the same bytes.

    Raises:
        ConfigError: a file is missing, half-written, of a newer schema or of another search; or it cannot be written.
    """
    place = Path(folder)
    if (place / CAPACITY_FILE).is_file() and not (place / TRIALS_FILE).is_file():
        return save_plan_report(place)
    return save_search_report(place)


def save_search_report(folder: str | os.PathLike[str]) -> Path:
    """`save_report` of a search."""
    files = read_search(folder)
    page = page_of_tables(files) if files.config is None else search_page(files)
    return write_atomically(Path(folder) / REPORT_FILE, page)


def save_tables_report(folder: str | os.PathLike[str]) -> Path:
    """The same of a search that left no config, for nothing fitted or it was interrupted: from its tables alone.

    A config that an earlier search has left there is not looked at.
    """
    return write_atomically(Path(folder) / REPORT_FILE, page_of_tables(read_tables(folder)))


def save_plan_report(folder: str | os.PathLike[str]) -> Path:
    """`save_report` of a plan."""
    return write_atomically(Path(folder) / REPORT_FILE, plan_page(read_plan(folder), read_modules(folder)))
