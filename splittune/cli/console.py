"""What all commands share: the console, log lines above a bar, and the ways to leave."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console

from splittune.config.data import Strategy
from splittune.errors import SplittuneError

EXIT_NO_FEASIBLE_SPLIT = 1
EXIT_NOT_VERIFIED = 1
EXIT_BAD_USAGE = 2
EXIT_JOB_FAILED = 3
# 128 and the signal's number, as a shell has it.
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM

# Seconds after which what goes on is said where there is no terminal. A choice: shorter work needs no word.
LONG_S = 2.0

console = Console()


def say(text: str) -> None:
    """Print as it is: no markup, no colours for numbers, no line breaks of the console's own."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def working(what: str, *, is_shown: bool = True) -> Iterator[None]:
    """Meanwhile `what` is shown: a spinner in a terminal, elsewhere a line, once it takes longer than `LONG_S`.

    ``"reading runs/split"``; where it is not to be shown, nothing.
    """
    if not is_shown:
        yield
        return
    if console.is_terminal:
        with console.status(what):
            yield
        return
    timer = Timer(LONG_S, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say_how_to_wrap(strategy: Strategy, device: str | None = None) -> None:
    """Print the lines that train under a config; `device` is the first real one, for one planned on virtual ones."""
    if strategy == "ddp":
        say('    model = config.wrap(model, devices="cuda")  # in a process for each card, as torchrun starts them')
        say("    loader = config.shard(loader)  # this rank's part of every batch")
    else:
        named = "" if device is None else f', devices=["{device}", ...]'
        say(f"    model = config.wrap(model{named})")


def say_error(error: SplittuneError) -> None:
    """Say on standard error what went wrong."""
    Console(stderr=True).print(f"splittune: {error}", style="red", highlight=False, markup=False, soft_wrap=True)


def log_above_the_bar(level: int) -> None:
    """Show log records from `level` up as lines of the console."""
    logging.basicConfig(level=level, format="%(message)s", handlers=[_LinesAboveTheBar()], force=True)


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Leave by SIGTERM, as a scheduler sends it, the way Ctrl-C does.

    The job is put back and finished trials are kept. In other threads than the main one, which
    alone may set handlers, nothing is changed.
    """

    def leave(_number: int, _frame: object) -> None:
        sys.exit(EXIT_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _LinesAboveTheBar(logging.Handler):
    """Log records as lines of the console, which keeps a progress bar below them; never wrapped."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))
