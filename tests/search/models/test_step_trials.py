from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from splittune.profiling.measurement import Measurement, Outcome
from splittune.search.choices import LEAST_NOISE
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.step_trials import StepTrials
from splittune.split import BatchSplit
from tests.search.problem import even, job, split, trials

B = 64


def test_trials_that_ran_are_rows() -> None:
    """Failures have no row; steps, shards and step times stand in the order of the trials."""
    problem = job(2, B=B)
    ran = trials(problem, [even(B, 8, 2), split(B, 4, 6, 10)])
    failed = JudgedTrial(measurement=Measurement(split=even(B, 1, 2), outcome=Outcome.OUT_OF_MEMORY))
    told = StepTrials.of([ran[0], failed, ran[1]])
    assert told.steps.tolist() == [8, 4]
    assert told.shards.tolist() == [[4, 4], [6, 10]]
    assert np.exp(told.log_step_s) == pytest.approx([one.measurement.step_time_s for one in ran])
    assert told.tells_busy
    assert told.busy_s.shape == (2, 2)
    assert told.num_devices == 2


def test_a_whole_step_alone_gives_an_equal_part_to_each_micro_step() -> None:
    """2 s for 4 micro-steps are 0.5 s each; without memory readings no total is known."""
    whole = Measurement(split=even(B, 4, 2), outcome=Outcome.OK, whole_step_times_s=(2.0,))
    told = StepTrials.of([JudgedTrial(measurement=whole)])
    assert told.micro_step_s.tolist() == [0.5]
    assert told.totals == [0, 0]
    assert not told.tells_busy


def test_the_noise_is_that_of_the_trial_in_the_middle() -> None:
    """A clock that repeats exactly has the least noise; one wild trial of three does not count."""
    problem = job(2, B=B)
    ran = trials(problem, [even(B, k, 2) for k in (16, 8, 4)])
    assert StepTrials.of(ran).noise == LEAST_NOISE
    wild = replace(ran[0].measurement, micro_step_times_s=(0.1, 0.2, 0.3))
    assert StepTrials.of([JudgedTrial(measurement=wild), *ran[1:]]).noise == LEAST_NOISE
    assert StepTrials.of([JudgedTrial(measurement=wild)]).noise == pytest.approx(1.25 * 0.1 / 3**0.5 / 0.2, rel=0.01)


def test_an_update_tells_by_itself_from_three_micro_steps_on() -> None:
    """In rounds of one or two micro-steps these hold what is copied once a step; whole steps alone tell neither."""
    ran = trials(job(2, B=64), [even(64, k, 2) for k in (1, 2, 3, 32)])
    told = StepTrials.of(ran)
    assert told.tells_micro_steps.tolist() == [1, 1, 1, 1]
    assert told.tells_updates.tolist() == [0, 0, 1, 1]
    whole = replace(ran[3].measurement, micro_step_times_s=(), update_times_s=(), whole_step_times_s=(1.0,))
    assert StepTrials.of([JudgedTrial(measurement=whole)]).tells_updates.tolist() == [0]


def timed(steps: int, shards: tuple[int, ...], micro_step_s: float, update_s: float) -> JudgedTrial:
    """A trial that took as long each time."""
    batch = BatchSplit(global_batch_size=sum(shards) * steps, accumulation_steps=steps, shard_sizes=shards)
    measured = Measurement(
        split=batch, outcome=Outcome.OK, micro_step_times_s=(micro_step_s,) * 3, update_times_s=(update_s,) * 3
    )
    return JudgedTrial(measurement=measured)


def test_what_is_copied_once_a_step_is_no_work_of_a_single_micro_step() -> None:
    """Updates at 4 steps say how long it takes; a step takes as long as it did, and GPU 0 alone copies nothing."""
    ran = [timed(1, (4, 4), 0.280, 0.026), timed(4, (1, 1), 0.060, 0.079), timed(1, (8, 0), 0.280, 0.026)]
    told = StepTrials.of(ran)
    assert told.micro_step_s == pytest.approx([0.227, 0.060, 0.280])
    assert told.update_s == pytest.approx([0.079, 0.079, 0.026])
    assert told.tells_updates.tolist() == [1, 1, 0]
    assert np.exp(told.log_step_s) == pytest.approx([0.306, 0.319, 0.306])


def test_what_is_copied_is_told_by_updates_of_as_many_devices() -> None:
    """With two devices beside GPU 0 others with two do, and where none has two one with one; noise is nothing."""
    ran = [timed(2, (0, 2, 2), 0.2, 0.02), timed(4, (0, 1, 1), 0.1, 0.06), timed(8, (1, 1, 0), 0.1, 0.04)]
    assert StepTrials.of(ran).update_s == pytest.approx([0.06, 0.06, 0.04])
    assert StepTrials.of(ran).micro_step_s == pytest.approx([0.18, 0.1, 0.1])
    assert StepTrials.of([ran[0], ran[2]]).micro_step_s == pytest.approx([0.19, 0.1])
    near = timed(4, (0, 1, 1), 0.1, 0.0203)
    assert StepTrials.of([ran[0], near]).micro_step_s == pytest.approx([0.2, 0.1])


def test_something_is_left_of_a_micro_step_whatever_is_copied() -> None:
    """An update that took a second once, for whatever reason, leaves a tenth; a whole step alone is left as it is."""
    whole = Measurement(split=even(8, 1, 2), outcome=Outcome.OK, whole_step_times_s=(0.2,))
    ran = [timed(1, (4, 4), 0.2, 0.02), timed(4, (1, 1), 0.1, 1.0), JudgedTrial(measurement=whole)]
    assert StepTrials.of(ran).micro_step_s == pytest.approx([0.02, 0.1, 0.2])
