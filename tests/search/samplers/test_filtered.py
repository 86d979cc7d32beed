from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import BaseSampler, RandomSampler

from splittune.search import SAMPLER_NAMES, SearchResult, find_best_split, report, suggest_split
from splittune.search.judged_trials import JudgedTrial
from splittune.search.samplers.filtered import FilteredSampler
from splittune.search.storage.records import demand
from splittune.split import BatchSplit, SplitSpace
from tests.search.jobs import JOBS
from tests.search.problem import Job, failing_after, linear_job, split

PLAIN = [name for name in SAMPLER_NAMES if name != "guided"]


def search(name: str, sampler: str | BaseSampler, **options: Any) -> tuple[list[BatchSplit], SearchResult]:
    problem = JOBS[name]()
    result = find_best_split(
        problem.space(),
        problem.measure,
        sampler=sampler,
        confirm=problem.confirm,
        min_headroom_bytes=problem.min_headroom_bytes,
        **{"max_trials": 14, **options},
    )
    return problem.measured, result


@pytest.mark.parametrize("sampler", PLAIN)
@pytest.mark.parametrize("name", ["GPU 0 almost full", "two kinds of cards", "eight cards, many samples"])
def test_a_plain_sampler_finds_the_baseline_and_repeats_nothing(sampler: str, name: str) -> None:
    """The baseline is the even split with the fewest steps that fits, no split comes twice, none
    that is ruled out comes."""
    measured, result = search(name, sampler)
    assert len(set(measured)) == len(measured)
    problem = JOBS[name]()
    demands = problem.min_headroom_bytes
    told = [trial.measurement for trial in result.trials if trial.kind == "search"]
    judged = [JudgedTrial.of(measurement, demands) for measurement in told]
    for place, one in enumerate(judged):
        assert not any(earlier.rules_out(one.split) for earlier in judged[:place])
    assert result.baseline is not None
    assert result.baseline.split == problem.baseline()
    assert result.trials[0].measurement.split == next(problem.space().even_splits())
    assert result.speedup is not None
    assert result.speedup >= 1


@pytest.mark.parametrize("sampler", ["tpe", "random"])
@pytest.mark.parametrize("stopped_after", [3, 9])
def test_a_resumed_search_draws_what_an_uninterrupted_one_does(
    tmp_path: Path, sampler: str, stopped_after: int
) -> None:
    """Samplers with a random state of their own are seeded anew for each trial, so an interruption changes nothing."""
    problem = JOBS["noise"]()
    expected, result = search("noise", sampler, seed=7)
    options = {"sampler": sampler, "seed": 7, "storage": tmp_path / "study.log", "max_trials": 14}
    stopping = failing_after(stopped_after, problem.measure, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        find_best_split(problem.space(), stopping, min_headroom_bytes=problem.min_headroom_bytes, **options)
    resumed = find_best_split(
        problem.space(),
        problem.measure,
        confirm=problem.confirm,
        min_headroom_bytes=problem.min_headroom_bytes,
        **options,
    )
    assert problem.measured == expected
    assert resumed == result


def optimize(sampler: FilteredSampler, problem: Job, num_trials: int) -> None:
    study = optuna.create_study(direction="maximize", sampler=sampler)
    demand(study, (0, 0))

    def objective(trial: optuna.Trial) -> float:
        return report(trial, problem.measure(suggest_split(trial, problem.space())))

    study.optimize(objective, n_trials=num_trials)


class Stubborn(BaseSampler):
    """Proposes the same parameters every time."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self.params[param_name]


def searched(problem: Job, sampler: BaseSampler, max_trials: int) -> SearchResult:
    return find_best_split(problem.space(), problem.measure, sampler=sampler, max_trials=max_trials)


def test_what_was_measured_is_replaced_by_the_nearest_that_is_open() -> None:
    """A sampler that insists gets its split, then those with the same steps and the least different
    shards; reasons tell."""
    problem = linear_job(B=16, num_devices=2)
    result = searched(problem, Stubborn({"accumulation_steps": 2, "gpu0_share": 0.25}), max_trials=5)
    assert problem.measured[:2] == [split(16, 1, 8, 8), split(16, 2, 2, 6)]
    assert set(problem.measured[2:4]) == {split(16, 2, 1, 7), split(16, 2, 3, 5)}
    reasons = [trial.reason for trial in result.trials if trial.kind == "search"]
    assert reasons[0] == "even split at k=1: looking for the baseline"
    assert reasons[1] == "proposed by Stubborn"
    assert reasons[2].startswith("proposed by Stubborn; nearest open one to 16 = 2 x (2 + 6)")


def test_what_a_failure_rules_out_is_replaced_too() -> None:
    """After GPU 0 lacked memory with 8 samples, a proposal of 12 becomes one that still may fit."""
    problem = linear_job(B=16, num_devices=2, total_mib=(450, 100_000))
    searched(problem, Stubborn({"accumulation_steps": 1, "gpu0_share": 0.75}), max_trials=6)
    proposed = problem.measured[problem.measured.index(split(16, 2, 4, 4)) + 1 :]
    assert problem.measured[0] == split(16, 1, 8, 8)
    assert proposed[0] == split(16, 1, 7, 9)
    assert all(one.shard_sizes[0] < 8 for one in proposed)


def test_it_stops_when_no_listed_split_is_open() -> None:
    """A filtered sampler has no other reason to stop than that everything is measured or ruled out."""
    space = SplitSpace(global_batch_size=2, num_devices=1)
    sampler = FilteredSampler(space, lambda _: RandomSampler())
    problem = linear_job(B=2, num_devices=1)
    judged = [JudgedTrial(measurement=problem.measure(split(2, k, 2 // k))) for k in (1, 2)]
    assert sampler.why_stop(judged[:1]) is None
    assert sampler.why_stop(judged) == "space exhausted"


def test_the_inner_sampler_is_made_anew_with_the_number_of_finished_trials() -> None:
    """Each proposal comes from a sampler made for it, so that only what is finished sways it."""
    made: list[int] = []

    def make(num_finished: int) -> BaseSampler:
        made.append(num_finished)
        return RandomSampler(seed=num_finished)

    problem = linear_job(B=16, num_devices=2)
    sampler = FilteredSampler(problem.space(), make)
    optimize(sampler, problem, 3)
    assert made == [0, 0, 1, 2]
