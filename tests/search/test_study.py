from __future__ import annotations

import logging
from itertools import pairwise

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.errors import ConfigError, NoFeasibleSplitError
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search import SAMPLER_NAMES, GuidedSampler, Trial, find_best_split
from splittune.search.judged_trials import JudgedTrial
from splittune.split import BatchSplit, SplitSpace
from tests.search.problem import MIB, Job, linear_job

TIGHT = (550, 100_000, 100_000, 100_000)


def searched(trials: tuple[Trial, ...] | list[Trial]) -> list[BatchSplit]:
    return [trial.measurement.split for trial in trials if trial.kind == "search"]


@st.composite
def problems(draw: st.DrawFn) -> Job:
    num_devices = draw(st.integers(1, 4))
    return linear_job(
        B=draw(st.integers(1, 20)),
        num_devices=num_devices,
        total_mib=tuple(draw(st.lists(st.integers(0, 1500), min_size=num_devices, max_size=num_devices))),
        output_mib=draw(st.sampled_from([0.0, 20.0])),
        gradients_mib=draw(st.sampled_from([0.0, 150.0])),
        oom=draw(st.sampled_from(["readings", "named", "silent"])),
    )


@given(problem=problems(), sampler=st.sampled_from(SAMPLER_NAMES), seed=st.integers(0, 3))
def test_no_split_is_measured_twice_and_none_that_is_ruled_out(problem: Job, sampler: str, seed: int) -> None:
    """Whatever the job and the sampler, each searched split is new, and no earlier failure ruled it out."""
    trials: list[Trial] = []
    try:
        find_best_split(
            problem.space(), problem.measure, max_trials=12, sampler=sampler, seed=seed, on_trial=trials.append
        )
    except NoFeasibleSplitError:
        assert not any(trial.measurement.outcome is Outcome.OK for trial in trials)
    splits = searched(trials)
    assert len(splits) == len(set(splits)) <= 12
    measurements = [trial.measurement for trial in trials if trial.kind == "search"]
    demands = (0,) * problem.num_devices
    judged = [JudgedTrial.of(measurement, demands) for measurement in measurements]
    for place, split in enumerate(splits):
        assert not any(one.rules_out(split) for one in judged[:place])


@given(problem=problems(), sampler=st.sampled_from(SAMPLER_NAMES))
def test_the_baseline_is_the_even_split_with_the_fewest_steps_that_fits(problem: Job, sampler: str) -> None:
    """With enough trials the baseline is exactly that, or None where no even split fits; best is never slower.

    The guided search tries no split that may run out of memory, so that of its own trials it is.
    """
    try:
        result = find_best_split(problem.space(), problem.measure, max_trials=14, sampler=sampler)
    except NoFeasibleSplitError:
        assert sampler == "guided" or problem.baseline() is None
        return
    fewest = problem.baseline()
    if sampler == "guided":
        tried = [one for one in problem.space().even_splits() if one in problem.measured]
        fewest = next((one for one in tried if problem.fits(one)), None)
    assert (None if result.baseline is None else result.baseline.split) == fewest
    if result.baseline is not None:
        assert result.speedup is not None
        assert result.speedup >= 1
    assert problem.fits(result.best.split)
    assert result.best in [trial.measurement for trial in result.trials if trial.kind == "confirm"]


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_the_same_search_twice_is_the_same(sampler: str) -> None:
    """Two runs with the same seed are equal in every trial and in the result."""
    first, second = linear_job(total_mib=TIGHT), linear_job(total_mib=TIGHT)
    results = [find_best_split(p.space(), p.measure, max_trials=14, sampler=sampler, seed=3) for p in (first, second)]
    assert results[0] == results[1]
    assert first.measured == second.measured


def test_the_seed_matters_to_those_that_draw() -> None:
    """Another seed makes "random" draw other splits."""
    runs = []
    for seed in (0, 1):
        problem = linear_job()
        find_best_split(problem.space(), problem.measure, max_trials=8, sampler="random", seed=seed)
        runs.append(problem.measured)
    assert runs[0] != runs[1]


def test_stops_at_max_trials_and_numbers_in_order() -> None:
    """The searched trials are as many as allowed; confirmations follow; numbers count them all."""
    problem = linear_job(total_mib=TIGHT)
    result = find_best_split(problem.space(), problem.measure, max_trials=5)
    assert result.stopped == "max_trials"
    assert len(searched(result.trials)) == 5
    assert [trial.number for trial in result.trials] == list(range(len(result.trials)))
    assert [trial.kind for trial in result.trials] == ["search"] * 5 + ["confirm"] * (len(result.trials) - 5)


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_a_space_of_one_split_is_searched(sampler: str) -> None:
    """A single legal split is measured, confirmed, and wins."""
    problem = linear_job(B=1, num_devices=1)
    result = find_best_split(problem.space(), problem.measure, sampler=sampler)
    assert result.stopped == "space exhausted"
    assert result.best.split == BatchSplit(global_batch_size=1, accumulation_steps=1, shard_sizes=(1,))
    assert result.baseline == result.best


def test_stops_at_the_timeout_and_still_confirms() -> None:
    """No trial begins after the timeout, and the finalists are confirmed nevertheless."""
    problem = linear_job(total_mib=TIGHT)
    now = 0.0

    def measure(split: BatchSplit) -> Measurement:
        nonlocal now
        now += 10.0
        return problem.measure(split)

    result = find_best_split(problem.space(), measure, timeout_s=45.0, clock=lambda: now)
    assert result.stopped == "timeout"
    assert len(searched(result.trials)) == 5
    assert result.trials[-1].kind == "confirm"
    assert {trial.elapsed_s for trial in result.trials} == {10.0}


def test_too_little_headroom_is_no_fit() -> None:
    """A split that ran but kept too little is judged so, is no winner, and its message shows the arithmetic."""
    problem = linear_job(B=16, num_devices=2, total_mib=1000)
    result = find_best_split(problem.space(), problem.measure, min_headroom_bytes=(500 * MIB, 0))
    judged = {trial.measurement.split: trial.measurement for trial in result.trials}
    assert judged[BatchSplit(global_batch_size=16, accumulation_steps=1, shard_sizes=(8, 8))].message.startswith(
        "device 0: 1000.0 MiB in all"
    )
    assert max(result.best.split.shard_sizes[:1]) <= 5


def test_every_finished_trial_is_reported_as_it_ends() -> None:
    """on_trial sees each trial, confirmations too, in the order of the result."""
    problem = linear_job(total_mib=TIGHT)
    seen: list[Trial] = []
    result = find_best_split(problem.space(), problem.measure, max_trials=6, on_trial=seen.append)
    assert tuple(seen) == result.trials
    assert all(trial.number < after.number for trial, after in pairwise(seen))


def test_confirm_has_the_last_word() -> None:
    """Finalists are measured by `confirm` where one is given, and by nothing else."""
    problem, longer = linear_job(total_mib=TIGHT), linear_job(total_mib=TIGHT, c=0.5)
    result = find_best_split(problem.space(), problem.measure, max_trials=6, confirm=longer.measure)
    assert len(problem.measured) == 6
    assert longer.measured == [trial.measurement.split for trial in result.trials[6:]]
    assert result.best.throughput == pytest.approx(longer.throughput(result.best.split))


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.OUT_OF_MEMORY])
def test_a_failed_trial_does_not_end_the_search(outcome: Outcome) -> None:
    """A split that crashes, or that the hardware is too small for, is a data point."""
    problem = linear_job(B=16, num_devices=2)

    def measure(split: BatchSplit) -> Measurement:
        if split.accumulation_steps == 1 and split.gpu0_bsz == 8:
            return Measurement(split=split, outcome=outcome, message="no")
        return problem.measure(split)

    result = find_best_split(problem.space(), measure)
    assert result.baseline is not None
    assert result.baseline.split.accumulation_steps == 2
    assert result.best.split.accumulation_steps == 1


def test_optuna_is_quiet_and_its_verbosity_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    """A search writes nothing of Optuna's to the terminal, and leaves its log level as it was."""
    optuna.logging.set_verbosity(logging.INFO)
    problem = linear_job(total_mib=TIGHT)
    find_best_split(problem.space(), problem.measure, max_trials=12, sampler="tpe")
    with pytest.raises(ZeroDivisionError):
        find_best_split(problem.space(), lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert optuna.logging.get_verbosity() == logging.INFO
    assert capfd.readouterr() == ("", "")


def foreign_samplers() -> dict[str, optuna.samplers.BaseSampler]:
    grid = {"accumulation_steps": [1, 2, 3, 6], "gpu0_share": [0.0, 0.2, 0.5, 1.0]}
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        qmc = optuna.samplers.QMCSampler(seed=0, warn_independent_sampling=False)
    return {
        "random": optuna.samplers.RandomSampler(seed=0),
        "tpe": optuna.samplers.TPESampler(seed=0, n_startup_trials=2),
        "grid": optuna.samplers.GridSampler(grid, seed=0),
        "qmc": qmc,
    }


@pytest.mark.parametrize("name", ["random", "tpe", "grid", "qmc"])
@pytest.mark.parametrize("total_mib", [100_000, (250, 100_000)], ids=["all fits", "GPU 0 is limited"])
def test_any_optuna_sampler_works_to_the_last_split(name: str, total_mib: int | tuple[int, ...]) -> None:
    """Optuna's own samplers are kept to new splits that may fit, after the baseline, until none is left."""
    problem = linear_job(B=6, num_devices=2, total_mib=total_mib)
    sampler = foreign_samplers()[name]
    result = find_best_split(problem.space(), problem.measure, max_trials=100, sampler=sampler)
    assert result.stopped == "space exhausted"
    assert len(set(searched(result.trials))) == len(searched(result.trials))
    assert problem.throughput(result.best.split) == pytest.approx(problem.best_throughput)
    assert result.trials[0].measurement.split == next(problem.space().even_splits())
    assert any(trial.reason.startswith(f"proposed by {sampler}") for trial in result.trials)


def test_a_sampler_of_ours_can_be_given_as_an_instance() -> None:
    """The default sampler, handed in as an object, searches as it does by name."""
    problem, other = linear_job(total_mib=TIGHT), linear_job(total_mib=TIGHT)
    given_one = GuidedSampler(problem.space())
    result = find_best_split(problem.space(), problem.measure, max_trials=10, sampler=given_one)
    assert result == find_best_split(other.space(), other.measure, max_trials=10)


def test_a_sampler_for_another_space_is_refused() -> None:
    """A sampler that chooses from other splits would choose nonsense."""
    problem = linear_job()
    other = GuidedSampler(SplitSpace(global_batch_size=8, num_devices=4))
    with pytest.raises(ConfigError, match="make it for the same space"):
        find_best_split(problem.space(), problem.measure, sampler=other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_trials": 0}, "max_trials is 0: expected an integer of at least 1"),
        ({"max_trials": 2.5}, "max_trials is 2.5: expected an integer"),
        ({"timeout_s": 0}, "timeout_s is 0: expected seconds above 0, or None"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"sampler": "best"}, "sampler is 'best': expected one of 'guided', 'grid', 'random', 'tpe', 'gp'"),
        ({"sampler": 7}, "sampler is 7: expected one of"),
        ({"min_headroom_bytes": -1}, "min_headroom_bytes is -1: expected an integer of at least 0"),
        ({"min_headroom_bytes": 0.5}, "min_headroom_bytes is 0.5: expected an integer of at least 0"),
        ({"min_headroom_bytes": (1, 2, 3, -4)}, "min_headroom_bytes[3] is -4: expected an integer of at least 0"),
        ({"min_headroom_bytes": (1, 2)}, "min_headroom_bytes has 2 numbers for 4 devices"),
    ],
    ids=str,
)
def test_unusable_arguments_are_refused_before_anything_is_measured(options: dict[str, object], message: str) -> None:
    """An argument out of range says what it is, what is expected, and nothing is measured."""
    problem = linear_job()
    with pytest.raises(ConfigError) as refused:
        find_best_split(problem.space(), problem.measure, **options)  # type: ignore[arg-type]
    assert message in str(refused.value)
    assert problem.measured == []


def test_a_measurement_of_another_split_is_refused() -> None:
    """A measure that answers for a split it was not asked about has a bug, and the error says so."""
    problem = linear_job(B=8, num_devices=2)
    wrong = BatchSplit(global_batch_size=8, accumulation_steps=2, shard_sizes=(1, 3))
    with pytest.raises(ConfigError, match=r"asked for 8 = 4 x \(1 \+ 1\) and returned a measurement of 8 = 2 x"):
        find_best_split(problem.space(), lambda _: problem.measure(wrong))
