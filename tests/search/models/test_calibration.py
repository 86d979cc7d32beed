from __future__ import annotations

from collections.abc import Sequence

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.calibration import Calibration
from splittune.search.models.step_time import TimeModel
from tests.search.problem import CardTime, Job, even, job, trial


def trials_of(problem: Job, *steps: int) -> list[JudgedTrial]:
    count = problem.num_devices
    return [trial(problem, even(problem.B, k, count), problem.min_headroom_bytes) for k in steps]


def after(trials: Sequence[JudgedTrial]) -> Calibration:
    """Each trial but the first was foretold from those before it."""
    calibration = Calibration()
    for place in range(1, len(trials)):
        calibration.observe(trials[place], TimeModel(trials[:place]))
    return calibration


def test_nothing_is_doubted_before_anything_was_predicted() -> None:
    """The first trial that ran is no prediction's proof, and none is in doubt."""
    assert Calibration().doubt == 1
    assert after(trials_of(job(2, B=64), 32)).doubt == 1


def test_predictions_that_come_true_leave_no_doubt() -> None:
    """On straight lines every further trial is as foretold once two were measured."""
    assert after(trials_of(job(2, B=64), 32, 8, 4, 2, 1, 3, 5)).doubt == 1


def test_a_surprise_is_remembered_and_forgotten() -> None:
    """From 20 samples on a kernel takes half as long again: whoever was sure of the line is doubted, until
    later predictions come true."""
    times = [CardTime(launch_s=0.003, sample_s=0.001, switch_at=20, switch_factor=1.5)] * 2
    trials = trials_of(job(2, B=96, times=times), 48, 24, 12, 6, 4, 2, 3, 1, 8, 5)
    before, surprised, later = (after(trials[:count]).doubt for count in (5, 6, 10))
    assert before < 2 < surprised
    assert later < surprised


def test_a_trial_that_did_not_run_says_nothing_of_times() -> None:
    """There is no time to compare."""
    few = job(2, B=64)
    known, failed = trials_of(few, 32, 16), trials_of(job(2, B=64), 8)[0]
    calibration = after(known)
    before = calibration.doubt
    calibration.observe(JudgedTrial(measurement=_failed(failed)), TimeModel(known))
    assert calibration.doubt == before


def _failed(one: JudgedTrial) -> Measurement:
    return Measurement(split=one.split, outcome=Outcome.OUT_OF_MEMORY)
