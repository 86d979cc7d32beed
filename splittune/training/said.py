"""What is said of a job is said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def each_said_once() -> Iterator[None]:
    """Within it, what splittune logs of a job is logged the first time that it is true, and not for every copy of it.

    Worked: a search over ranks runs the job on copies for each kind of card, and each finds that no loss was given.
    """
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        is_first = record.levelno < logging.INFO or str(record.msg) not in said
        said.add(str(record.msg))
        return is_first

    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "splittune"]
    for name in names:
        logging.getLogger(name).addFilter(is_new)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(is_new)
