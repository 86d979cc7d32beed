"""report.html in the folder of a search or of a plan, made from the files that lie there."""

from __future__ import annotations

import os
from pathlib import Path

from splittune.config.files import write_atomically
from splittune.report.files import REPORT_FILE
from splittune.report.page.source import read_search
from splittune.report.page.tuned import search_page


def save_report(folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` from the other files of `folder`; the same files give the same bytes.

    Raises:
        ConfigError: a file is missing, half-written, of a newer schema or of another search; or it cannot be written.
    """
    return write_atomically(Path(folder) / REPORT_FILE, search_page(read_search(folder)))
