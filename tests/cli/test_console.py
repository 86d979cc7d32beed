"""What shows that something goes on: a spinner in a terminal, a line elsewhere, nothing where quiet was asked for."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from splittune.cli.console import working
from tests.cli.command_line import CARDS, Run
from tests.processes import wait_until


class AtOnce:
    """A timer whose time is up when it starts."""

    def __init__(self, interval: float, function: Callable[..., None], args: list[str]) -> None:
        self.interval, self.function, self.args = interval, function, args

    def start(self) -> None:
        assert self.interval == 2.0
        self.function(*self.args)

    def cancel(self) -> None: ...


class Never(AtOnce):
    """One whose work was done before."""

    def start(self) -> None: ...


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], io.StringIO]:
    def of(is_terminal: bool) -> io.StringIO:
        file = io.StringIO()
        shown = Console(file=file, force_terminal=is_terminal, width=100)
        monkeypatch.setattr("splittune.cli.console.console", shown)
        return file

    return of


@pytest.mark.parametrize(("timer", "said"), [(AtOnce, "reading runs/split ...\n"), (Never, "")])
def test_where_there_is_no_terminal_a_line_says_what_takes_long(
    timer: type[AtOnce], said: str, screen: Callable[[bool], io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of what is done in two seconds."""
    monkeypatch.setattr("splittune.cli.console.Timer", timer)
    file = screen(False)
    with working("reading runs/split"):
        pass
    assert file.getvalue() == said


def test_in_a_terminal_there_is_a_spinner_that_goes_again(screen: Callable[[bool], io.StringIO]) -> None:
    """Also where the work raises."""
    file = screen(True)

    def work() -> None:
        with working("reading runs/split"):
            wait_until(lambda: "reading runs/split" in file.getvalue())
            raise LookupError

    with pytest.raises(LookupError):
        work()
    assert file.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is back, the line is gone"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_quiet_shows_nothing(
    is_terminal: bool, screen: Callable[[bool], io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a spinner nor a line."""
    monkeypatch.setattr("splittune.cli.console.Timer", AtOnce)
    file = screen(is_terminal)
    with working("reading runs/split", is_shown=False):
        pass
    assert file.getvalue() == ""


COMMANDS = {
    "tune": (("tune", "job.py:make_task", *CARDS, "--max-trials", "2", "--out", "split"), "making the job of job.py"),
    "verify": (("verify", "split/split.json", "job.py:make_task", "--steps", "1"), "making the job of job.py"),
    "plan": (("plan", "job.py:make_task", *CARDS, "--max-trials", "2", "--out", "plan"), "making the job of job.py"),
    "export": (("export", "split", "--to", "torchrun", "--force"), "reading split and its trials"),
    "report": (("report", "split"), "reading split, and drawing its report"),
}


def test_every_command_says_what_takes_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is asked to be quiet: then the result alone is shown, with the same exit code."""
    monkeypatch.setattr("splittune.cli.console.Timer", AtOnce)
    for name, (arguments, said) in COMMANDS.items():
        shown = run(*arguments)
        assert (shown.code, shown.err) == (0, ""), name
        assert f"{said}" in shown.out, name
        assert "\x1b" not in shown.out, name
        quiet = run(*arguments, "--quiet")
        assert quiet.code == 0, name
        assert " ...\n" not in quiet.out, name
        assert quiet.out, name


def test_tune_and_plan_say_that_they_write(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pictures of hundreds of trials take seconds; so does a job until its first trial."""
    monkeypatch.setattr("splittune.cli.console.Timer", AtOnce)
    tuned = run(*COMMANDS["tune"][0])
    assert "making the job, and reading a batch ...\n" in tuned.out
    assert "writing the tables and report of split ...\n" in tuned.out
    assert "writing the tables, pictures and report of plan ...\n" in run(*COMMANDS["plan"][0]).out
    assert json.loads((tmp_path / "split/split.json").read_text())["schema"]
