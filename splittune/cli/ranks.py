"""A command that runs on ranks: whether this process is one of them, and how they leave together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import typer

from splittune.cli.console import EXIT_INTERRUPTED, EXIT_TERMINATED, sigterm_as_exit, working
from splittune.errors import ConfigError, RanksError, SplittuneError
from splittune.ranks.group import is_grouped
from splittune.runners.launch.agent import launch
from splittune.runners.launch.attempts import Attempts
from splittune.runners.launch.outcome import is_everybodys, let_the_cause_end, write_verdict
from splittune.runners.launch.place import Place, place_of
from splittune.runners.launch.rank import GRACE_S, end_now, joined
from splittune.training.load_task import checked_target

LIMIT_NAME = "--trial-timeout-s"


def launch_this(num_ranks: int, *, max_restarts: int) -> NoReturn:
    """Run this very command on so many processes, started again at most so often, and exit as they do.

    Raises:
        WorkerError: they could not be kept alive.
    """
    code = launch(sys.argv[1:], num_ranks, max_restarts=max_restarts, limit_name=LIMIT_NAME)
    raise typer.Exit(code)


@contextmanager
def as_rank(place: Place, *, on_cards: bool, trial_timeout_s: float, quiet: bool = False) -> Iterator[None]:
    """Meanwhile this process is a rank of the command. That it was done counts for the launch, once rank 0 has.

    SIGTERM and Ctrl-C end a trial on every rank in order, for each is asked: what was on its way is not a crash. A job
    that calls sys.exit ends no otherwise, and is no result. While ranks have not started yet, rank 0 says so, if not
    `quiet`.
    """
    with sigterm_as_exit(), ExitStack() as stack:
        with working(f"waiting for all {place.world_size} ranks to start", is_shown=place.is_first and not quiet):
            stack.enter_context(joined(place, on_cards=on_cards, collective_timeout_s=trial_timeout_s + GRACE_S))
        try:
            yield
        except SystemExit:
            end_now(EXIT_TERMINATED)
        except KeyboardInterrupt:
            end_now(EXIT_INTERRUPTED)
    write_verdict(place, 0)


def checked_job(target: str) -> str:
    """The same ``FILE.py:FUNCTION``; the file is there, unless this process is a rank.

    Ranks look for it once they are a group: then what one of them lacks is said by all alike.

    Raises:
        ConfigError: malformed, or no such file.
    """
    return checked_target(target) if _place() is None else target


def check_strategy(place: Place, strategy: str) -> None:
    """That ranks tune what ranks train with.

    Raises:
        ConfigError: another strategy.
    """
    if strategy != "ddp":
        raise ConfigError(
            f"this process is rank {place.rank} of {place.world_size}, as a launcher started it, and --strategy is "
            f"{strategy}: expected ddp, for each of them would tune by itself. Give --strategy ddp, or start the "
            "command without torchrun."
        )


def leave(error: BaseException, code: int, show: Callable[[], None]) -> NoReturn:
    """Exit with `code` after `error`, which `show` says on standard error; ranks first find whether all have the same.

    Where they have, rank 0 says it, and the launch ends with `code`. Else it is a surprise: whoever has it says so, and
    the launcher starts all of them again.
    """
    place = _place()
    words = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if place is None or place.world_size == 1 or not is_grouped():
        if place is not None and place.folder is not None:
            Attempts(place.folder).note_error(place.rank, words)
        show()
        sys.exit(code)
    is_alike = is_everybodys(place, code, type(error).__name__)
    settled = is_alike and not isinstance(error, RanksError)
    if settled and place.is_first:
        show()
    elif not settled:
        sys.stderr.write(f"splittune: rank {place.rank}: {words}\n")
    if settled:
        write_verdict(place, code)
    elif place.folder is not None:
        Attempts(place.folder).note_error(place.rank, words)
    if isinstance(error, RanksError) and not is_alike:
        let_the_cause_end()
    end_now(0 if settled and place.folder is not None else code)


def leave_with(place: Place, code: int) -> NoReturn:
    """Exit as all ranks do, which have found the same: with `code`, and no error."""
    write_verdict(place, code)
    raise typer.Exit(0 if place.folder is not None else code)


def _place() -> Place | None:
    try:
        return place_of()
    except SplittuneError:
        return None
