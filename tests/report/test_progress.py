"""What people see of a search and of its result: plain lines, a live bar in a terminal, or nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from splittune.config import SplitConfig
from splittune.hardware.base import Device, DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report import TuneResult
from splittune.report.console import show_memory_plan, show_result
from splittune.report.progress import (
    ConsoleCallback,
    SilentCallback,
    callback_for,
    describe_trial,
)
from splittune.search import Trial
from splittune.split import BatchSplit, SplitSpace
from splittune.units import GIB
from tests.profiling.fake_hardware import FakeHardware

SPLIT = BatchSplit(global_batch_size=64, accumulation_steps=2, shard_sizes=(8, 24))
EVEN = BatchSplit(global_batch_size=64, accumulation_steps=4, shard_sizes=(8, 8))
SPACE = SplitSpace(global_batch_size=64, num_devices=2)


def memory(device: int, *, outside_gib: float = 1, reserved_gib: float = 2) -> DeviceMemory:
    reserved = int(reserved_gib * GIB)
    return DeviceMemory(
        device=device,
        total_bytes=8 * GIB,
        outside_bytes=int(outside_gib * GIB),
        peak_allocated_bytes=reserved,
        peak_reserved_bytes=reserved,
    )


def ran(split: BatchSplit, step_time_s: float, outcome: Outcome = Outcome.OK) -> Measurement:
    return Measurement(
        split=split,
        outcome=outcome,
        whole_step_times_s=(step_time_s,),
        memory=(memory(0, outside_gib=4, reserved_gib=3.5), memory(1)),
    )


def trial(measurement: Measurement, number: int = 3, kind: str = "search") -> Trial:
    return Trial(number=number, kind=kind, measurement=measurement, reason="k=2: a first guess")  # type: ignore[arg-type]


BEST, BASELINE = ran(SPLIT, 0.5), ran(EVEN, 0.8)
FAILED = Measurement(split=EVEN, outcome=Outcome.OUT_OF_MEMORY, message="device 0: CUDA out of memory")


def result(baseline: Measurement | None = BASELINE, *, is_modelled: bool = True) -> TuneResult:
    config = SplitConfig(
        split=SPLIT,
        devices=tuple(Device(index=i, name=f"CARD{i}", torch_device="cpu", total_bytes=8 * GIB) for i in range(2)),
        min_headroom_bytes=(0, 0),
        planned_peak_reserved_bytes=(3 * GIB, 2 * GIB),
        virtual_spec="2xCARD" if is_modelled else None,
        is_modelled=is_modelled,
    )
    return TuneResult(best=BEST, baseline=baseline, trials=(), config=config)


class Screen:
    """A console, and what was written on it."""

    def __init__(self, *, width: int = 100, is_terminal: bool = False) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, width=width, force_terminal=is_terminal, legacy_windows=False)

    @property
    def text(self) -> str:
        return self.file.getvalue()


def search(callback: ConsoleCallback | SilentCallback, hardware: FakeHardware | None = None) -> None:
    callback.on_start(hardware or FakeHardware(is_modelled=True), SPACE, 24)
    callback.on_measure(EVEN, in_whole_steps=False)
    callback.on_trial(trial(FAILED, 0))
    callback.on_measure(SPLIT, in_whole_steps=False)
    callback.on_trial(trial(BEST, 1))
    callback.on_measure(SPLIT, in_whole_steps=True)
    callback.on_trial(trial(BEST, 2, "confirm"))
    callback.on_end()


# a search


@pytest.mark.parametrize("width", [30, 200])
def test_every_trial_is_one_plain_line(width: int) -> None:
    """Where it is no terminal every trial is one line, however narrow, without escape codes."""
    screen = Screen(width=width)
    search(ConsoleCallback(screen.console))
    assert "\x1b" not in screen.text
    lines = screen.text.splitlines()
    assert lines[0].startswith("GPU 0  fake: ")
    assert "64 samples a step over 2 devices" in lines[2]
    assert "at most 24 trials" in lines[2]
    assert lines[3].startswith("trial  0  4 x (8+8)")
    assert "out of memory" in lines[3]
    assert lines[4].startswith("trial  1  2 x (8+24)")
    assert "128.0 samples/s, 512.0 MiB left on GPU 0" in lines[4]
    assert lines[4].endswith("k=2: a first guess")
    assert lines[5].startswith("confirm   2 x (8+24)")
    assert len(lines) == 6


def test_a_terminal_shows_what_is_measured_and_the_best_so_far() -> None:
    """In a terminal a bar says which trial runs, what is being measured, and the best so far; at the end it is gone."""
    screen = Screen(width=160, is_terminal=True)
    callback = ConsoleCallback(screen.console)
    callback.on_start(FakeHardware(is_modelled=True), SPACE, 24)
    callback.on_trial(trial(BEST, 0))
    callback.on_measure(EVEN, in_whole_steps=True)
    callback._progress.refresh()
    assert "1/24" in screen.text
    assert "in whole steps 4 x (8+8); best 2 x (8+24), 128.0 samples/s (modelled)" in screen.text
    callback.on_end()
    assert screen.text.endswith("\x1b[2K")  # the bar's line is erased


def test_real_hardware_is_not_called_modelled() -> None:
    """Only figures from a model are called modelled."""
    screen = Screen(width=160, is_terminal=True)
    search(ConsoleCallback(screen.console), FakeHardware(is_modelled=False))
    assert "modelled" not in screen.text


def test_nothing_is_shown_without_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """progress=False shows nothing at all."""
    callback = callback_for(progress=False)
    search(callback)
    assert capsys.readouterr() == ("", "")


def test_progress_is_shown_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output stays the caller's."""
    search(callback_for(progress=True))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "trial  1" in captured.err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_search_that_never_started_may_end(is_terminal: bool) -> None:
    """An error before the first trial ends the callback all the same."""
    ConsoleCallback(Screen(is_terminal=is_terminal).console).on_end()


@pytest.mark.parametrize(
    ("measurement", "words"),
    [
        (BEST, "128.0 samples/s, 512.0 MiB left on GPU 0"),
        (ran(SPLIT, 0.5, Outcome.NO_HEADROOM), "too little headroom"),
        (FAILED, "out of memory"),
        (Measurement(split=EVEN, outcome=Outcome.CRASHED, message="worker died"), "crashed"),
        (Measurement(split=SPLIT, outcome=Outcome.OK, whole_step_times_s=(0.5,)), "128.0 samples/s"),
    ],
)
def test_a_trial_is_described_by_how_it_went(measurement: Measurement, words: str) -> None:
    """A trial's line has its split, its speed or what went wrong, and why it was tried."""
    line = describe_trial(trial(measurement))
    assert words in line
    assert "k=2: a first guess" in line
    assert "\n" not in line


# the result


def test_the_baseline_stands_beside_the_best() -> None:
    """The table has both splits with their speed; the factor follows, and where the memory of each card went."""
    screen = Screen()
    show_result(result(), screen.console)
    for words in ("4 x (8+8)", "2 x (8+24)", "80.0", "128.0", "1.60 times the even split's throughput, modelled"):
        assert words in screen.text
    assert "samples/s, modelled" in screen.text
    assert "########=======.  3.50 GiB, 512.0 MiB left" in screen.text


@pytest.mark.parametrize("width", [60, 200])
def test_the_explanation_follows_the_memory(width: int) -> None:
    """Below the bars stands why the cards are so full, broken at words, on any width of screen."""
    screen = Screen(width=width)
    show_result(result(), screen.console)
    bars, _, words = screen.text.rpartition("\n\n")
    assert "left" in bars
    assert " ".join(words.split()) == result().explanation
    assert max(map(len, words.splitlines())) <= width


def test_a_measured_result_is_not_called_modelled() -> None:
    """What real cards did is not called modelled."""
    screen = Screen()
    show_result(result(is_modelled=False), screen.console)
    assert "modelled" not in screen.text


def test_a_missing_baseline_is_said() -> None:
    """Where no even split fits, that is what the table says, and there is no factor."""
    screen = Screen()
    show_result(result(baseline=None), screen.console)
    assert "fits at no number of steps" in screen.text
    assert "times" not in screen.text


@pytest.mark.parametrize(
    ("reserved_gib", "verdict"), [(3, "as planned"), (2.5, "as planned"), (3.1, "MORE THAN PLANNED")]
)
def test_what_training_took_stands_beside_the_plan(reserved_gib: float, verdict: str) -> None:
    """Each card's peak in training is compared with its plan, and one that exceeds it is called out."""
    screen = Screen()
    show_memory_plan(result().config, (memory(0, reserved_gib=reserved_gib), memory(1)), screen.console)
    line = next(line for line in screen.text.splitlines() if "CARD0" in line)
    assert "3.00 GiB" in line
    assert verdict in line
