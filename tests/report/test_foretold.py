"""One sentence says what a plan foretold of the best split, beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from splittune.profiling.foretold import Foretold
from splittune.profiling.measurement import Measurement, Outcome
from splittune.report.console import show_result
from splittune.report.foretold import describe_foretold
from tests.report.results import BASELINE, BEST, SPLIT, Screen, memory, ran, result, trial

PLANNED = ran(SPLIT, 0.515, memory=(memory(0, outside_gib=4, reserved_gib=3.25), memory(1)))
SENTENCE = (
    "The plan for these cards foretold (modelled) 515.0 ms a step (measured 500.0 ms: +3 %) and 3.25 GiB on GPU 0 "
    "(measured 3.50 GiB)."
)


def test_time_and_the_card_that_is_furthest_off_are_told() -> None:
    """Planned first, each with what was measured."""
    assert describe_foretold(Foretold(planned=(PLANNED,)), BEST) == SENTENCE


def test_a_plan_that_says_it_does_not_fit_is_told_so() -> None:
    """With the card that lacks memory."""
    lacking = Measurement(split=SPLIT, outcome=Outcome.OUT_OF_MEMORY, message="device 0: Virtual GPU 0 lacks 1.00 GiB")
    said = describe_foretold(Foretold(planned=(lacking,)), BEST)
    assert said == (
        "The plan for these cards foretold (modelled) that this split would not fit: device 0: Virtual GPU 0 lacks "
        "1.00 GiB."
    )


@pytest.mark.parametrize("planned", [(), (ran(BASELINE.split, 0.7),)])
def test_no_plan_has_its_reason(planned: tuple[Measurement, ...]) -> None:
    """Also where the baseline alone was foretold."""
    said = describe_foretold(Foretold(planned=planned, why="GPU 0 is a Quadro 9"), BEST)
    assert said == "No plan for these cards stands beside what was measured: GPU 0 is a Quadro 9."


@pytest.mark.parametrize("verbose", [False, True])
def test_a_console_shows_it_once(verbose: bool) -> None:
    """Of a search on virtual cards nothing is said."""
    foretold = Foretold(planned=(PLANNED,))
    for given, times in ((foretold, 1), (None, 0)):
        screen = Screen(width=400)
        show_result(result(is_modelled=False, foretold=given), screen.console, verbose=verbose)
        assert " ".join(screen.text.split()).count(SENTENCE) == times


def test_tables_hold_it_beside_what_was_measured(tmp_path: Path) -> None:
    """Each trial of the split, and no other."""
    trials = (
        trial(BEST, 0),
        trial(BASELINE, 1),
        trial(BEST, 2, "confirm"),
        trial(replace(BEST, loss_placement="replica")),
    )
    result(is_modelled=False, trials=trials, foretold=Foretold(planned=(PLANNED,))).save(tmp_path)
    steps = pd.read_csv(tmp_path / "trials.csv")["planned_step_time_s"]
    assert [None if pd.isna(step) else step for step in steps] == [0.515, None, 0.515, None]
    devices = pd.read_csv(tmp_path / "devices.csv")
    both = devices[["planned_peak_allocated_bytes", "planned_peak_reserved_bytes"]]
    planned = [(each.peak_allocated_bytes, each.peak_reserved_bytes) for each in PLANNED.memory]
    assert [tuple(row) for row in both.dropna().itertuples(index=False)] == planned * 2
    assert list(both.dropna().index) == [0, 1, 4, 5]
    assert SENTENCE in " ".join((tmp_path / "explanation.txt").read_text().split())
