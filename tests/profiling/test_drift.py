from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from splittune.profiling.drift import NUM_TRIALS_BETWEEN, DriftWatch, anchored
from splittune.profiling.measurement import Measurement, Outcome
from splittune.split import BatchSplit
from tests.profiling.fake_hardware import FakeHardware
from tests.profiling.job import Job, split


def measured(accumulation_steps: int, step_s: float, spread: float = 0.0) -> Measurement:
    """Three whole steps around `step_s`."""
    times = (step_s * (1 - spread), step_s, step_s * (1 + spread))
    return Measurement(split=split(accumulation_steps), outcome=Outcome.OK, whole_step_times_s=times)


def out_of_memory(accumulation_steps: int) -> Measurement:
    return Measurement(split=split(accumulation_steps), outcome=Outcome.OUT_OF_MEMORY)


def due_after(watch: DriftWatch, *measurements: Measurement) -> list[BatchSplit | None]:
    """What is due after each."""
    due = []
    for measurement in measurements:
        watch.remember(measurement)
        due.append(watch.due())
    return due


def test_the_fastest_split_is_due_every_few_trials() -> None:
    """Once so many trials ended since the fastest was measured, and then again after as many."""
    watch = DriftWatch(is_modelled=False)
    slower = [measured(8, 2.0)] * NUM_TRIALS_BETWEEN
    assert due_after(watch, measured(2, 1.0), *slower, *slower) == [
        None,
        *[None] * (NUM_TRIALS_BETWEEN - 1),
        split(2),
        *[None] * (NUM_TRIALS_BETWEEN - 1),
        split(2),
    ]


def test_a_faster_split_becomes_the_anchor() -> None:
    """It was measured just now, so it is due only after as many trials more."""
    watch = DriftWatch(is_modelled=False)
    trials = [measured(2, 1.0), measured(8, 2.0), measured(4, 0.9), *[out_of_memory(1)] * NUM_TRIALS_BETWEEN]
    assert due_after(watch, *trials) == [None] * (len(trials) - 1) + [split(4)]


def test_without_a_split_that_ran_nothing_is_due() -> None:
    """There is no time to compare with."""
    watch = DriftWatch(is_modelled=False)
    assert due_after(watch, *[out_of_memory(1)] * 3 * NUM_TRIALS_BETWEEN) == [None] * 3 * NUM_TRIALS_BETWEEN


def test_a_modelled_clock_does_not_drift() -> None:
    """On virtual devices no trial is spent on it."""
    watch = DriftWatch(is_modelled=True)
    assert set(due_after(watch, *[measured(2, 1.0)] * 20)) == {None}


@pytest.mark.parametrize(
    ("again_s", "said"),
    [(1.06, "6% slower"), (0.90, "10% faster"), (1.029, None), (0.971, None)],
)
def test_a_change_is_told_with_both_times(again_s: float, said: str | None) -> None:
    """Beyond 3 % the devices have changed; below, nobody can tell."""
    watch = DriftWatch(is_modelled=False)
    watch.remember(measured(2, 1.0))
    note = watch.compare(measured(2, again_s))
    if said is None:
        assert note is None
    else:
        assert note is not None
        assert said in note
        assert f"took 1000.0 ms a step, and takes {again_s * 1e3:.1f} ms now" in note


def test_what_noise_explains_is_no_change() -> None:
    """Times known to some per cent must differ by more than that."""
    watch = DriftWatch(is_modelled=False)
    watch.remember(measured(2, 1.0, spread=0.02))
    assert watch.compare(measured(2, 1.06, spread=0.02)) is None
    assert watch.compare(measured(2, 1.30, spread=0.02)) is not None


def test_after_a_change_the_new_time_is_compared_with() -> None:
    """A change is told once, not at every turn from then on."""
    watch = DriftWatch(is_modelled=False)
    watch.remember(measured(2, 1.0))
    assert watch.compare(measured(2, 1.2)) is not None
    assert watch.compare(measured(2, 1.2)) is None


def test_an_anchor_that_does_not_run_any_more_shows_nothing_of_speed() -> None:
    """It lacks memory now: the notes of the trial itself say what others took."""
    watch = DriftWatch(is_modelled=False)
    watch.remember(measured(2, 1.0))
    assert watch.compare(out_of_memory(2)) is None


class Slowing(FakeHardware):
    """Phases take a second each, and twice that from the trial `from_trial` on."""

    def __init__(self, from_trial: int, **options: Any) -> None:
        self.num_trials = 0

        def durations() -> Iterator[float]:
            while True:
                yield 2.0 if self.num_trials >= from_trial else 1.0

        super().__init__(durations_s=durations(), **options)

    def wrap(self, *args: Any, **options: Any) -> Any:
        self.num_trials += 1
        return super().wrap(*args, **options)


def test_the_anchor_is_measured_again_and_notes_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    """Cards that become half as fast in mid-search: the trial after which it shows says so, and
    trials go on unabridged."""
    hardware = Slowing(from_trial=5)
    measure = anchored(Job(hardware).profiler.measure, is_modelled=False)
    trials = [measure(split(k)) for k in (2, 8, 8, 8, 8, 1)]
    noted = [place for place, trial in enumerate(trials) if any("100% slower" in note for note in trial.notes)]
    assert noted == [5]
    assert hardware.num_trials == 7, "six trials and the anchor once more"
    assert "The devices have become 100% slower" in caplog.text
    assert len(trials[5].micro_step_times_s) == 3, "compared with the anchor as it is now, it is not cut short"


def test_steady_cards_are_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The anchor is measured again, and nothing is said."""
    hardware = Slowing(from_trial=99)
    measure = anchored(Job(hardware).profiler.measure, is_modelled=False)
    trials = [measure(split(k)) for k in (2, 8, 8, 8, 8, 8)]
    assert hardware.num_trials == 7
    assert all(not any("devices have become" in note for note in trial.notes) for trial in trials)
    assert "devices have become" not in caplog.text


def test_on_virtual_devices_every_trial_is_the_searchs() -> None:
    """A modelled clock costs no extra trial."""
    hardware = Slowing(from_trial=99, is_modelled=True)
    measure = anchored(Job(hardware).profiler.measure, is_modelled=True)
    for _ in range(2 * NUM_TRIALS_BETWEEN + 1):
        measure(split(2))
    assert hardware.num_trials == 2 * NUM_TRIALS_BETWEEN + 1


@pytest.mark.parametrize("fault", ["crashed", "raised"])
def test_an_anchor_that_fails_costs_no_trial(fault: str) -> None:
    """One that crashes says nothing of speed, and the trial after it is measured; one that raises
    finds all trials handed over."""
    asked: list[BatchSplit] = []

    def measure(wanted: BatchSplit) -> Measurement:
        asked.append(wanted)
        if asked.count(split(2)) < 2 or wanted != split(2):
            return measured(wanted.accumulation_steps, 1.0 if wanted == split(2) else 2.0)
        if fault == "raised":
            raise ZeroDivisionError
        return Measurement(split=wanted, outcome=Outcome.CRASHED)

    measure_with_anchor = anchored(measure, is_modelled=False)
    trials = [measure_with_anchor(split(k)) for k in (2, 8, 8, 8, 8)]
    assert [trial.outcome for trial in trials] == [Outcome.OK] * 5
    if fault == "raised":
        with pytest.raises(ZeroDivisionError):
            measure_with_anchor(split(4))
        assert asked[-1] == split(2)
    else:
        assert measure_with_anchor(split(4)) == measured(4, 2.0)
        assert asked[-2:] == [split(2), split(4)]
