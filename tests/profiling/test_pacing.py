"""How much of a split a trial runs: until warm, until known well enough, and no more than it is worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count, cycle, repeat
from math import ceil

import pytest
import torch

from splittune.profiling.measurement import Measurement
from splittune.profiling.pacing import (
    FIRST_WARM_UP_S,
    MAX_ROUNDS,
    MIN_ROUNDS,
    MIN_WHOLE_STEPS,
    NUM_SETTLED,
    Pacer,
)
from tests.profiling.fake_hardware import FakeHardware
from tests.profiling.job import B, Job, Model, split

# The first trial's phases before its rounds: a step, then three more, of 1 s each.
WARM_UP = [1.0] * 4


def one_round(*parts_s: float) -> list[float]:
    """The phases of a round of these micro-steps and this update, where a stop costs nothing: unbroken it takes as
    long."""
    return [*parts_s, sum(parts_s)]


def trial_of(part_s: float, *, is_first: bool = False) -> Iterator[float]:
    """The phases of a trial of a single micro-step, whose parts and warm-up steps take so long each."""
    num_warm_ups = ceil(FIRST_WARM_UP_S / part_s) if is_first else NUM_SETTLED
    return chain(repeat(part_s, 1 + num_warm_ups), cycle(one_round(part_s, part_s)))


def measured(durations_s: list[float], accumulation_steps: int = 1) -> Measurement:
    """The first trial of a job, whose warm-up takes 1 s a step and whose phases then take `durations_s`."""
    before = WARM_UP if accumulation_steps == 1 else [*WARM_UP[:1], 1.0, 1.0, *WARM_UP[1:]]
    hardware = FakeHardware(durations_s=chain(before, durations_s))
    return Job(hardware).profiler.measure(split(accumulation_steps))


# what is run


@pytest.mark.parametrize(("accumulation_steps", "num_micro_steps"), [(1, 1), (2, 2), (3, 3), (4, 3), (32, 3), (64, 3)])
def test_a_trial_costs_no_more_with_many_accumulation_steps(accumulation_steps: int, num_micro_steps: int) -> None:
    """A step, a single one, warm-ups, then rounds of one to three micro-steps and an update, each of them twice,
    however large k is."""
    job = Job(FakeHardware())
    trial = job.profiler.measure(split(accumulation_steps))
    size = -(-B // accumulation_steps)
    parts = [*[size] * num_micro_steps, "update"]
    single = [size, "update"] if num_micro_steps > 1 else []
    assert job.steps == [size, "update", *single, *parts * 3, *parts * 2 * MIN_ROUNDS]
    assert len(trial.micro_step_times_s) == (1 if num_micro_steps == 3 else num_micro_steps) * MIN_ROUNDS
    assert len(trial.update_times_s) == len(trial.unbroken_round_times_s) == MIN_ROUNDS


def test_a_modelled_clock_is_asked_once() -> None:
    """A clock that repeats itself exactly needs one warm-up and one round, in parts, and one whole step."""
    job = Job(FakeHardware(is_modelled=True))
    assert job.profiler.measure(split(4)).unbroken_round_times_s == ()
    assert job.steps == [16, "update", 16, "update", 16, 16, 16, "update"]
    job.steps.clear()
    job.profiler.measure_whole_steps(split(3))
    assert job.steps == [22, "update", 22, 21, 21, "update"]


def test_whole_steps_run_every_micro_batch() -> None:
    """Whole steps run k micro-batches of the sizes that training will have, then the update, each timed as one."""
    job = Job(FakeHardware(durations_s=[1.0] * 3 + [4.0] * MIN_WHOLE_STEPS))
    trial = job.profiler.measure_whole_steps(split(5))
    assert split(5).micro_batch_sizes == (13, 13, 13, 13, 12)
    assert job.steps == [13, 12, "update"] * 3 + [13, 13, 13, 13, 12, "update"] * MIN_WHOLE_STEPS
    assert trial.whole_step_times_s == (4.0,) * MIN_WHOLE_STEPS


@pytest.mark.parametrize(("k", "warm_up"), [(1, [64]), (2, [32, 32]), (3, [21, 22, 21]), (7, [9, 10, 9]), (64, [1, 1])])
def test_every_size_that_is_timed_is_warmed_up(k: int, warm_up: list[int]) -> None:
    """Before whole steps each size has run, with accumulation where they accumulate: libraries search once for each."""
    job = Job(FakeHardware())
    job.profiler.measure_whole_steps(split(k))
    assert job.steps[: len(warm_up) + 1] == [*warm_up, "update"]
    assert set(split(k).micro_batch_sizes) == set(warm_up)


# warming up


def num_warm_ups(job: Job, durations_s: list[float]) -> int:
    """Optimizer steps that a trial of a single micro-step runs before its three rounds."""
    job.steps.clear()
    job.hardware._durations_s = chain(durations_s, repeat(0.25))
    trial = job.profiler.measure(split(1))
    return job.steps.count("update") - 2 * len(trial.update_times_s)


def test_the_first_trial_warms_cold_devices_up() -> None:
    """Steps that agree from the start are run for 3 s in the first trial; later ones begin as soon as three agree."""
    job = Job(FakeHardware())
    assert num_warm_ups(job, []) == 1 + 12
    assert num_warm_ups(job, []) == 1 + 3


@pytest.mark.parametrize(
    ("steps_s", "expected"),
    [
        pytest.param([0.5, 0.375, 0.25, 0.25, 0.25], 5, id="until three agree"),
        pytest.param([0.5, 0.5, 0.515625, 0.5, 0.5, 0.5], 6, id="3 % apart"),
        pytest.param([0.5, 0.5, 0.5078125], 3, id="1.6 % apart"),
        pytest.param([1.0, 2.0, 1.0, 2.0], 4, id="after 5 s"),
        pytest.param([20.0], 1, id="one very slow step"),
    ],
)
def test_warming_up_ends_when_steps_agree_or_time_is_up(steps_s: list[float], expected: int) -> None:
    """A later trial warms up until three steps in a row differ by 2 % at most, or 5 s are over."""
    job = Job(FakeHardware())
    job.profiler.measure(split(1))
    assert num_warm_ups(job, [0.25, *steps_s]) == 1 + expected


# how often


def test_the_median_counts() -> None:
    """One slow micro-step changes nothing; the step's time is k medians and the median update."""
    usual = one_round(2.0, 2.0, 2.0, 0.5)
    trial = measured(one_round(2.0, 40.0, 2.0, 0.5) + usual * (MAX_ROUNDS - 1), accumulation_steps=8)
    assert trial.step_time_s == 8 * 2.0 + 0.5


def test_rounds_go_on_until_the_median_is_known() -> None:
    """Steps of 1.5 s and 1/64 s more and less leave 3.2 % of doubt after three rounds, and 1.7 %
    after four: it ends."""
    micro_steps = (1.0, 1.015625, 0.984375, 1.0)
    trial = measured([time for micro_step in micro_steps for time in one_round(micro_step, 0.5)] + [9.0] * 60)
    assert trial.micro_step_times_s == micro_steps
    assert trial.relative_error == pytest.approx(0.017, abs=0.0005)
    unbroken = trial.unbroken_round_times_s[:3]
    fewer = replace(
        trial, micro_step_times_s=micro_steps[:3], update_times_s=(0.5,) * 3, unbroken_round_times_s=unbroken
    )
    assert fewer.relative_error == pytest.approx(0.0324, abs=0.0005)


def test_rounds_end_on_a_clock_that_never_settles() -> None:
    """After twenty rounds it ends, and the measurement says that it is noisy, and by how much."""
    rounds = [time for micro_step in (0.125, 0.25, 0.5) for time in one_round(micro_step, 0.125)]
    hardware = FakeHardware(durations_s=chain(WARM_UP, cycle(rounds)))
    trial = Job(hardware).profiler.measure(split(1))
    assert len(trial.micro_step_times_s) == MAX_ROUNDS
    assert trial.is_noisy
    assert trial.relative_error is not None
    assert trial.relative_error > 0.02


@pytest.mark.parametrize("whole", [False, True])
def test_a_trial_ends_when_its_budget_is_spent(whole: bool) -> None:
    """Of steps that take half a minute three are run, however much they differ: the budget is a minute."""
    profiler = Job(FakeHardware(durations_s=cycle([25.0, 40.0, 30.0]))).profiler
    trial = (profiler.measure_whole_steps if whole else profiler.measure)(split(1))
    assert len(trial.whole_step_times_s or trial.update_times_s) == 3
    assert trial.relative_error is not None


def test_whole_steps_go_on_until_the_median_is_known() -> None:
    """At least five whole steps, more while their median is in doubt, twenty at most."""
    steady = Job(FakeHardware()).profiler.measure_whole_steps(split(1))
    shaky = Job(FakeHardware(durations_s=cycle([1.0, 2.0, 1.5]))).profiler.measure_whole_steps(split(1))
    assert len(steady.whole_step_times_s) == MIN_WHOLE_STEPS
    assert len(shaky.whole_step_times_s) == MAX_ROUNDS


# cut short


def test_a_trial_that_is_clearly_slower_is_cut_short() -> None:
    """Once the fastest step took 0.5 s, one of more than 0.65 s is measured for one round, and says so."""
    job = Job(FakeHardware(durations_s=trial_of(0.25, is_first=True)))
    job.profiler.measure(split(1))
    job.hardware._durations_s = trial_of(0.375)
    trial = job.profiler.measure(split(1))
    assert len(trial.update_times_s) == len(trial.unbroken_round_times_s) == 1
    assert trial.step_time_s == 0.75
    assert trial.relative_error is None
    assert trial.notes == ("Cut short after one round: its step takes 1.50 times that of the fastest trial.",)


def test_a_trial_that_is_a_little_slower_is_measured_in_full() -> None:
    """Up to 1.3 times the fastest trial's step, and always without one, all rounds are run."""
    job = Job(FakeHardware())
    for duration_s in (0.25, 0.3125, 0.1875):
        job.hardware._durations_s = trial_of(duration_s, is_first=duration_s == 0.25)
        trial = job.profiler.measure(split(1))
        assert len(trial.update_times_s) == MIN_ROUNDS
        assert trial.notes == ()
    job.hardware._durations_s = trial_of(0.25)  # 1.33 times the last
    assert len(job.profiler.measure(split(1)).update_times_s) == 1


def test_what_training_overlaps_cuts_no_trial_short() -> None:
    """In parts a step takes 1.5 times the fastest, unbroken as long as that: the first round's unbroken one decides."""
    job = Job(FakeHardware(durations_s=trial_of(0.25, is_first=True)))
    job.profiler.measure(split(1))
    job.hardware._durations_s = chain([0.25] * 4, cycle([0.5, 0.25, 0.5]))
    trial = job.profiler.measure(split(1))
    assert len(trial.update_times_s) == MIN_ROUNDS
    assert trial.step_time_s == 0.5


def test_only_a_trial_that_could_be_used_sets_the_pace() -> None:
    """A fast trial that keeps too little headroom does not cut others short."""
    job = Job(FakeHardware(), min_headroom_bytes=700)
    for duration_s in (0.25, 1.0):
        job.hardware._durations_s = trial_of(duration_s, is_first=duration_s == 0.25)
        assert len(job.profiler.measure(split(1)).update_times_s) == MIN_ROUNDS


def test_neither_modelled_trials_nor_whole_steps_are_cut_short() -> None:
    """A modelled trial has one round anyway, and what is confirmed is confirmed in full."""
    job = Job(FakeHardware(is_modelled=True, durations_s=repeat(0.25)))
    job.profiler.measure(split(1))
    job.hardware._durations_s = repeat(1.0)
    assert job.profiler.measure(split(1)).notes == ()
    job = Job(FakeHardware(durations_s=trial_of(0.25, is_first=True)))
    job.profiler.measure(split(1))
    job.hardware._durations_s = repeat(1.0)
    assert len(job.profiler.measure_whole_steps(split(1)).whole_step_times_s) == MIN_WHOLE_STEPS


def test_a_pacer_may_have_another_budget() -> None:
    """The budget is in seconds of measured steps."""
    job = Job(FakeHardware(durations_s=cycle([1.0, 2.0, 1.5])))
    job.profiler._pacer = Pacer(is_modelled=False, budget_s=10.0)
    trial = job.profiler.measure_whole_steps(split(1))
    assert 10.0 <= sum(trial.whole_step_times_s) < 12.0


def test_the_budget_counts_unbroken_rounds_too() -> None:
    """Three rounds of 1.5 s and more, in parts and unbroken, spend 10 s, however much they differ."""
    rounds = [time for micro_step in (1.0, 2.0, 1.5) for time in one_round(micro_step, 0.5)]
    for budget_s, num_rounds in ((10.0, MIN_ROUNDS), (1000.0, MAX_ROUNDS)):
        job = Job(FakeHardware(durations_s=chain(WARM_UP, cycle(rounds))))
        job.profiler._pacer = Pacer(is_modelled=False, budget_s=budget_s)
        trial = job.profiler.measure(split(1))
        assert len(trial.update_times_s) == num_rounds
    assert sum(rounds) > 10.0 > sum(rounds) / 2


# what a stop costs


class StoppingHardware(FakeHardware):
    """A clock that runs with what the job does, and by `stop_s` for each phase: devices start from idle."""

    stop_s, now_s = 0.0, 0.0

    def clock(self) -> float:
        self._num_clock_reads += 1
        if self._num_clock_reads % 2 == 0:
            self.now_s += self.stop_s
        return self.now_s


def job_with_stops(stop_s: float) -> Job:
    """A sample takes 1/64 s in forward and backward, an update 1/8 s, and the start of idle devices `stop_s`."""
    hardware = StoppingHardware()
    hardware.stop_s = stop_s

    def run(samples: torch.Tensor) -> None:
        hardware.now_s += len(samples) / B

    def update() -> None:
        hardware.now_s += 0.125

    return Job(hardware, model=Model(run), on_update=update)


@pytest.mark.parametrize("stop_s", [0.0, 0.015625, 0.0625])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 4, 8, 16])
def test_stops_that_training_does_not_make_are_not_counted(accumulation_steps: int, stop_s: float) -> None:
    """Whatever a stop costs and however often a step accumulates: a step takes what it takes without one in it."""
    job = job_with_stops(stop_s)
    trial = job.profiler.measure(split(accumulation_steps))
    assert trial.step_time_s == pytest.approx(1.0 + 0.125 + stop_s, rel=1e-12)
    whole = job.profiler.measure_whole_steps(split(accumulation_steps))
    assert whole.step_time_s == pytest.approx(trial.step_time_s, rel=1e-12)


def test_samples_of_parts_are_kept_as_the_clock_told_them() -> None:
    """Micro-steps and updates have their stops, and the rounds without stops stand beside them."""
    trial = job_with_stops(0.0625).profiler.measure(split(8))
    assert trial.micro_step_times_s == (0.125 + 0.0625,) * MIN_ROUNDS
    assert trial.update_times_s == (0.125 + 0.0625,) * MIN_ROUNDS
    assert trial.unbroken_round_times_s == (3 * 0.125 + 0.125 + 0.0625,) * MIN_ROUNDS
    assert trial.micro_step_time_s == 0.125


# steps that a gradient scaler skips


class Skips(torch.amp.GradScaler):
    """Skips the steps of these numbers, as if their gradients had overflowed."""

    def __init__(self, *numbers: int) -> None:
        super().__init__("cpu", init_scale=2.0**20)
        self.numbers, self.num_steps = numbers, 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:  # type: ignore[override]
        self.num_steps += 1
        if self.num_steps not in self.numbers:
            optimizer.step()

    def update(self, new_scale: object = None) -> None:
        if self.num_steps in self.numbers:
            self._init_scale /= 2

    def get_scale(self) -> float:
        return self._init_scale


def test_a_round_whose_step_was_skipped_counts_nowhere() -> None:
    """Its micro-steps and its update are forgotten and run again; the first step, that makes the
    state, is repeated too."""
    job = Job(FakeHardware(is_modelled=True, durations_s=count(1.0)), grad_scaler=Skips(1, 4))
    trial = job.profiler.measure(split(2))
    # 1: skipped; 2: the first step; then a single one, and its update; 4: a round that is skipped;
    # the round that counts
    assert job.steps == [32, 32, "update", 32, "update", 32, 32, 32, 32, "update"]
    assert trial.micro_step_times_s == (8.0, 9.0)
    assert trial.update_times_s == (10.0,)
    assert trial.notes == ("2 steps were skipped by the gradient scaler, whose scale was too large, and not timed.",)


def test_an_unbroken_round_whose_step_was_skipped_is_forgotten_with_its_round() -> None:
    """Both are run again, and what is kept are pairs: parts, and the same unbroken."""
    good, spoilt = one_round(2.0, 2.0, 0.5), one_round(30.0, 30.0, 9.0)
    hardware = FakeHardware(durations_s=chain([1.0] * 6, good, spoilt, spoilt[:3], good * (MIN_ROUNDS - 1)))
    # steps 1 to 5 come before the rounds; 6 and 7 are the first, 9 is the second unbroken, 10 a
    # round in parts
    trial = Job(hardware, grad_scaler=Skips(9, 10)).profiler.measure(split(2))
    assert trial.micro_step_times_s == (2.0, 2.0) * MIN_ROUNDS
    assert trial.update_times_s == (0.5,) * MIN_ROUNDS
    assert trial.unbroken_round_times_s == (4.5,) * MIN_ROUNDS
    assert trial.notes == ("2 steps were skipped by the gradient scaler, whose scale was too large, and not timed.",)


def test_whole_steps_that_were_skipped_are_run_again() -> None:
    """Of whole steps those that were made are timed, as many as without."""
    hardware = FakeHardware(durations_s=chain([1.0] * 3, [4.0, 9.0], [4.0] * (MIN_WHOLE_STEPS - 1)))
    trial = Job(hardware, grad_scaler=Skips(5)).profiler.measure_whole_steps(split(2))
    assert trial.whole_step_times_s == (4.0,) * MIN_WHOLE_STEPS
    assert trial.notes == ("1 step was skipped by the gradient scaler, whose scale was too large, and not timed.",)


def test_warming_up_waits_for_steps_that_were_made() -> None:
    """A skipped step is no sign that the devices have settled."""
    job = Job(FakeHardware(), grad_scaler=Skips(2, 3, 4))
    job.profiler.measure_whole_steps(split(1))
    assert len([step for step in job.steps if step != "update"]) == 3 + 3 + MIN_WHOLE_STEPS
