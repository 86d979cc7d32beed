"""What people see of a search as it goes: plain lines, a live bar in a terminal, or nothing."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.progress import (
    HEADER,
    ConsoleCallback,
    SilentCallback,
    StepCallback,
    callback_for,
    describe_trial,
    lines_for,
)
from tests.profiling.fake_hardware import FakeHardware
from tests.report.results import BEST, EVEN, FAILED, SPACE, SPLIT, Screen, ran, trial


def search(callback: ConsoleCallback | SilentCallback, hardware: FakeHardware | None = None) -> None:
    callback.on_start(hardware or FakeHardware(is_modelled=True), SPACE, 24)
    callback.on_measure(EVEN, in_whole_steps=False)
    callback.on_trial(trial(FAILED, 0))
    callback.on_measure(SPLIT, in_whole_steps=False)
    callback.on_trial(trial(BEST, 1))
    callback.on_measure(SPLIT, in_whole_steps=True)
    callback.on_trial(trial(ran(SPLIT, 0.51), 2, "confirm"))
    callback.on_end()


@pytest.mark.parametrize("width", [30, 200])
def test_every_trial_is_one_plain_line(width: int) -> None:
    """Where it is no terminal: the cards, what is searched, a line a trial, however narrow, and no escape code."""
    screen = Screen(width=width)
    search(ConsoleCallback(screen.console))
    assert "\x1b" not in screen.text
    cards, searched, header, failed, fits, again = screen.lines
    assert cards.startswith("GPU 0-1  fake, ")
    assert cards.endswith(" free")
    assert searched.startswith("64 samples a step: at most 24 of ")
    assert searched.endswith("splits are tried (memory accounted, time modelled)")
    assert header == HEADER
    assert failed.split() == ["0", "4", "x", "(8+8)", "-", "out", "of", "memory"]
    assert fits.split() == ["1", "2", "x", "(8+24)", "128", "512.0", "MiB", "on", "GPU", "0"]
    assert again == "measured again in whole steps: 1 split agrees to 2.0 %"


def test_figures_stand_under_their_headings() -> None:
    """Trial numbers and speeds end where their headings do; splits and memory start there."""
    line = describe_trial(trial(BEST, 1))
    assert line.index("1") == HEADER.index("trial") + len("trial") - 1
    assert line.index("2 x (8+24)") == HEADER.index("accumulation")
    assert line.index("128") + 3 == HEADER.index("samples/s") + len("samples/s")
    assert line.index("512.0 MiB") == HEADER.index("least")


def test_verbose_tells_the_reasons_and_what_was_measured_again() -> None:
    """Why each split was tried, and a line for each in whole steps."""
    screen = Screen()
    search(ConsoleCallback(screen.console, verbose=True))
    assert screen.text.count("k=2: a first guess") == 3
    assert any("2 x (8+24)" in line and "(again)" in line for line in screen.lines)
    quiet = Screen()
    search(ConsoleCallback(quiet.console))
    assert "first guess" not in quiet.text


def test_a_split_that_fails_when_measured_again_has_its_line() -> None:
    """It is not among those that agree."""
    screen = Screen()
    callback = ConsoleCallback(screen.console)
    callback.on_start(FakeHardware(), SPACE, 24)
    callback.on_trial(trial(BEST, 0))
    callback.on_trial(trial(replace(FAILED, split=SPLIT), 1, "confirm"))
    callback.on_end()
    assert screen.lines[-1].endswith("out of memory (again)")


def test_several_measured_again_share_a_line() -> None:
    """The largest difference counts; each loss placement is its own."""
    screen = Screen()
    callback = ConsoleCallback(screen.console)
    for kind, factor in (("search", 1.0), ("confirm", 1.1)):
        callback.on_trial(trial(ran(SPLIT, 0.5), kind=kind))
        callback.on_trial(trial(ran(EVEN, 0.8 / factor), kind=kind))
        callback.on_trial(trial(ran(EVEN, 0.4, loss_placement="replica"), kind=kind))
    callback.on_end()
    assert screen.lines[-1] == "measured again in whole steps: 3 splits agree to 10.0 %"
    assert sum(line.endswith("loss in the replicas") for line in screen.lines) == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_goes_on_besides_trials_is_said(is_terminal: bool) -> None:
    """In the bar, or in a line of its own."""
    screen = Screen(is_terminal=is_terminal)
    callback = ConsoleCallback(screen.console)
    callback.on_start(FakeHardware(is_modelled=False), SPACE, 24)
    callback.on_activity("foretelling the same: at most 30 s")
    callback.on_end()
    assert "foretelling the same: at most 30 s" in screen.text


def test_what_is_logged_before_the_first_trial_stands_above_the_header() -> None:
    """The header comes with the first trial, once."""
    screen = Screen()
    callback = ConsoleCallback(screen.console)
    callback.on_start(FakeHardware(), SPACE, 24)
    screen.console.print("logged")
    callback.on_trial(trial(BEST, 0))
    callback.on_trial(trial(BEST, 1))
    assert screen.lines.index("logged") < screen.lines.index(HEADER)
    assert screen.lines.count(HEADER) == 1


def test_a_terminal_shows_what_is_measured_and_the_best_so_far() -> None:
    """In a terminal a bar says which trial runs, what is being measured, and the best so far; at the end it is gone."""
    screen = Screen(width=160, is_terminal=True)
    callback = ConsoleCallback(screen.console)
    callback.on_start(FakeHardware(is_modelled=True), SPACE, 24)
    callback.on_trial(trial(BEST, 0))
    callback.on_measure(EVEN, in_whole_steps=True)
    callback._progress.refresh()
    assert "1/24" in screen.text
    assert "in whole steps 4 x (8+8); best 2 x (8+24), 128 samples/s (modelled)" in screen.text
    callback.on_end()
    assert screen.text.endswith("\x1b[2K")  # the bar's line is erased


def test_real_hardware_is_not_called_modelled() -> None:
    """Only figures from a model are called modelled."""
    screen = Screen(width=160, is_terminal=True)
    search(ConsoleCallback(screen.console), FakeHardware(is_modelled=False))
    assert "modelled" not in screen.text


def test_nothing_is_shown_without_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """progress=False shows nothing at all."""
    search(callback_for(progress=False))
    assert capsys.readouterr() == ("", "")


def test_progress_is_shown_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output stays the caller's."""
    search(callback_for(progress=True))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 x (8+24)" in captured.err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_follows_a_search_is_said_in_a_terminal_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """Lines of their own on standard error, where no bar is; nothing without progress."""
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    lines_for(progress=True)("advice 1 of 7: bfloat16 [by autocast]")
    lines_for(progress=False)("nothing")
    assert capsys.readouterr() == ("", "advice 1 of 7: bfloat16 [by autocast]\n")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_search_that_never_started_may_end(is_terminal: bool) -> None:
    """An error before the first trial ends the callback all the same, and says nothing."""
    screen = Screen(is_terminal=is_terminal)
    ConsoleCallback(screen.console).on_end()
    assert "measured" not in screen.text


@pytest.mark.parametrize(
    ("measurement", "words"),
    [
        (BEST, "128  512.0 MiB on GPU 0"),
        (ran(SPLIT, 0.5, Outcome.NO_HEADROOM), "-  512.0 MiB on GPU 0, too little left"),
        (FAILED, "-  out of memory"),
        (replace(FAILED, loss_placement="replica"), "-  out of memory, loss in the replicas"),
        (Measurement(split=EVEN, outcome=Outcome.CRASHED, message="worker died"), "-  crashed"),
        (Measurement(split=SPLIT, outcome=Outcome.OK, whole_step_times_s=(0.5,)), "128"),
    ],
)
def test_a_trial_is_described_by_how_it_went(measurement: Measurement, words: str) -> None:
    """A trial's line has its split, its speed, and what it left free or what went wrong."""
    line = describe_trial(trial(measurement)).rstrip()
    assert line.endswith(words)
    assert "\n" not in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_people_see_of_a_run(is_terminal: bool) -> None:
    """The loss in a line at the first step and every tenth of them; a bar, which leaves nothing
    behind, in a terminal."""
    file = io.StringIO()
    callback = StepCallback(Console(file=file, width=100, force_terminal=is_terminal, legacy_windows=False))
    callback.on_activity("reading")
    for step in range(1, 101):
        callback.on_step(step, 100, 1 / step)
    callback.on_end()
    lines = [line for line in file.getvalue().splitlines() if "loss" in line and "step " in line]
    assert ("\x1b" in file.getvalue()) == is_terminal
    if not is_terminal:
        assert file.getvalue().startswith("reading\nstep   1  loss 1.000\nstep  10  loss 0.100\n")
        assert len(lines) == 11
