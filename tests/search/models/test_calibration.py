from __future__ import annotations

from splittune.search.models.calibration import Calibration
from tests.search.policies.story import search
from tests.search.problem import CardTime, Job, even, job, trial


def trials_of(problem: Job, *steps: int) -> list:  # type: ignore[type-arg]
    count = problem.num_devices
    return [trial(problem, even(problem.B, k, count), problem.min_headroom_bytes) for k in steps]


def test_nothing_is_doubted_before_anything_was_predicted() -> None:
    """The first trial that ran is no prediction's proof, and none is in doubt."""
    calibration = Calibration()
    assert calibration.doubt == 1
    calibration.observe(trials_of(job(2, B=64), 32), 0, None)
    assert calibration.doubt == 1


def test_predictions_that_come_true_leave_no_doubt() -> None:
    """On straight lines every further trial is as foretold once two were measured."""
    calibration = Calibration()
    calibration.observe(trials_of(job(2, B=64), 32, 8, 4, 2, 1, 3, 5), 0, None)
    assert calibration.doubt == 1


def test_a_surprise_is_remembered_and_forgotten() -> None:
    """From 20 samples on a kernel takes half as long again: whoever was sure of the line is doubted, until
    later predictions come true."""
    times = [CardTime(launch_s=0.003, sample_s=0.001, switch_at=20, switch_factor=1.5)] * 2
    trials = trials_of(job(2, B=96, times=times), 48, 24, 12, 6, 4, 2, 3, 1, 8, 5)
    calibration = Calibration()
    calibration.observe(trials[:5], 0, None)
    before = calibration.doubt
    calibration.observe(trials[:6], 5, None)
    surprised = calibration.doubt
    calibration.observe(trials, 6, None)
    assert before < 2 < surprised
    assert calibration.doubt < surprised


def test_it_depends_on_the_trials_alone() -> None:
    """One after the other, or all at once as after a resumption: the doubt is the same."""
    _, trials = search(job(3, B=128, noise=0.02), most=8)
    at_once, step_by_step = Calibration(), Calibration()
    at_once.observe(trials, 0, None)
    for known in range(len(trials)):
        step_by_step.observe(trials[: known + 1], known, None)
    assert at_once.doubt == step_by_step.doubt
