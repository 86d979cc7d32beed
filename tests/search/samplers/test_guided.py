"""What the guided search must hold, on jobs whose best split is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.storages import RDBStorage

from splittune.errors import NoFeasibleSplitError
from splittune.hardware.base import DeviceMemory
from splittune.profiling.measurement import Measurement, Outcome
from splittune.search import GuidedSampler, SearchResult, find_best_split, report, suggest_split
from splittune.search.samplers.parameters import distributions_of, split_of
from splittune.split import BatchSplit, SplitSpace
from tests.search.jobs import AFFINE, JOBS
from tests.search.problem import Job, card_memory, failing_after, job, split

MAX_TRIALS = 12
Database = Callable[[str], RDBStorage]
SOME = list(JOBS)[1::4]


def search(problem: Job, **options: object) -> SearchResult:
    options = {"max_trials": MAX_TRIALS, "min_headroom_bytes": problem.min_headroom_bytes, **options}
    return find_best_split(problem.space(), problem.measure, confirm=problem.confirm, **options)  # type: ignore[arg-type]


def outcomes(result: SearchResult) -> list[Outcome]:
    return [trial.measurement.outcome for trial in result.trials if trial.kind == "search"]


@pytest.mark.parametrize("name", AFFINE)
def test_nothing_runs_out_of_memory_where_memory_is_affine(name: str) -> None:
    """Once a first split fitted, the model foresees it in every phase, also where one sample fills a card."""
    told = outcomes(search(AFFINE[name]()))
    first_that_ran = next(i for i, outcome in enumerate(told) if outcome is not Outcome.OUT_OF_MEMORY)
    assert Outcome.OUT_OF_MEMORY not in told[first_that_ran:]


@pytest.mark.parametrize("name", JOBS)
def test_a_search_keeps_its_promises(name: str) -> None:
    """No split is measured twice; the winner was measured, keeps its headroom, and is no slower than the baseline."""
    problem = JOBS[name]()
    result = search(problem)
    assert len(set(problem.measured)) == len(problem.measured) <= MAX_TRIALS
    assert result.best.split in problem.measured
    assert result.best.outcome is Outcome.OK
    assert all(m.headroom_bytes >= d for m, d in zip(result.best.memory, problem.min_headroom_bytes, strict=True))
    assert result.speedup is None or result.speedup >= 1
    if result.baseline is not None:
        even = BatchSplit.even(
            global_batch_size=problem.B,
            accumulation_steps=result.baseline.split.accumulation_steps,
            num_devices=problem.num_devices,
        )
        assert result.baseline.split == even


def test_the_winners_are_near_the_best_there_is() -> None:
    """Over all these jobs the samples/s lost to the exhaustive optimum are 1 % at the median, 5 %
    at the worst but one."""
    lost = []
    for make in JOBS.values():
        problem = make()
        lost.append(1 - problem.throughput(search(problem).best.split) / problem.best_throughput)
    assert np.median(lost) <= 0.01
    assert sorted(lost)[-2] <= 0.05


@pytest.mark.parametrize("name", SOME)
def test_a_search_stopped_after_any_trial_goes_on_as_if_it_had_not_been(tmp_path: Path, name: str) -> None:
    """Interrupted after j trials and resumed from the storage, the search makes the trials of an uninterrupted one."""
    whole = JOBS[name]()
    expected = search(whole)
    searched = len(whole.measured)
    for stopped_after in {1, searched // 2, searched - 1} - {0}:
        parts = JOBS[name]()
        storage = tmp_path / f"{stopped_after}.log"
        with pytest.raises(KeyboardInterrupt):
            find_best_split(
                parts.space(),
                failing_after(stopped_after, parts.measure, KeyboardInterrupt()),
                max_trials=MAX_TRIALS,
                min_headroom_bytes=parts.min_headroom_bytes,
                storage=storage,
            )
        assert search(parts, storage=storage) == expected
        assert parts.measured == whole.measured


class Shuffled:
    """A job whose times, and peaks if wanted, are drawn anew for every split: no form fits them."""

    def __init__(self, name: str, *, keeps_memory: bool) -> None:
        self.problem = JOBS[name]()
        self.rng_seed = list(JOBS).index(name)
        self.keeps_memory = keeps_memory
        self.told: list[Measurement] = []

    def measure(self, tried: BatchSplit) -> Measurement:
        measurement = replace(self.problem.measure(tried), device_busy_s=None)
        if not measurement.micro_step_times_s:
            return measurement
        draws = np.random.default_rng([self.rng_seed, tried.accumulation_steps, *tried.shard_sizes])
        faster = float(draws.uniform(0.3, 3.0))
        measurement = replace(
            measurement, micro_step_times_s=tuple(faster * time for time in measurement.micro_step_times_s)
        )
        if not self.keeps_memory:
            measurement = replace(measurement, memory=self._shuffled(measurement.memory, draws))
        self.told.append(measurement)
        return measurement

    def _shuffled(self, memory: Sequence[DeviceMemory], draws: np.random.Generator) -> tuple[DeviceMemory, ...]:
        told = []
        for reading in memory:
            peak = int((reading.total_bytes - reading.outside_bytes) * draws.uniform(0.05, 1.0))
            told.append(
                replace(
                    reading,
                    peak_allocated_bytes=peak,
                    peak_reserved_bytes=peak,
                    micro_step_peak_bytes=peak,
                    update_peak_bytes=peak // 2,
                    single_step_peak_bytes=None,
                    resting_bytes=None,
                )
            )
        return tuple(told)


@pytest.mark.parametrize("keeps_memory", [True, False], ids=["time", "time and memory"])
@pytest.mark.parametrize("name", list(JOBS)[::2])
def test_against_the_models_form_it_ends_at_the_best_it_measured_and_says_so(name: str, keeps_memory: bool) -> None:
    """With the truth shuffled the winner is the best of what was measured, and `warnings` say that
    models did not fit."""
    shuffled = Shuffled(name, keeps_memory=keeps_memory)
    space, demands = shuffled.problem.space(), shuffled.problem.min_headroom_bytes
    try:
        result = find_best_split(space, shuffled.measure, min_headroom_bytes=demands)
    except NoFeasibleSplitError:
        assert all(one.judged(demands).outcome is not Outcome.OK for one in shuffled.told)
        return
    fitting = [t.measurement for t in result.trials if t.kind == "search" and t.measurement.outcome is Outcome.OK]
    best = max(fitting, key=lambda one: one.throughput or 0)
    assert result.best.throughput is not None
    assert best.throughput is not None
    assert result.best.throughput >= 0.95 * best.throughput
    if len(outcomes(result)) > 3:
        assert any("did not fit" in warning for warning in result.warnings)


def test_where_the_models_fit_there_is_no_doubt() -> None:
    """A job of the models' own form leaves nothing to be said."""
    assert search(job(4, B=96, reduce_s=0.001)).warnings == ()


# --- in a study of one's own -----------------------------------------------------------------------------------------


def optimize(problem: Job, storage: RDBStorage | None = None, n_trials: int = 40) -> optuna.Study:
    sampler = GuidedSampler(problem.space(), min_headroom_bytes=problem.min_headroom_bytes)
    study = optuna.create_study(
        direction="maximize", sampler=sampler, storage=storage, study_name="own", load_if_exists=True
    )

    def objective(trial: optuna.Trial) -> float:
        return report(trial, problem.measure(suggest_split(trial, problem.space())))

    study.optimize(objective, n_trials=n_trials)
    return study


@pytest.mark.parametrize("kept", ["memory", "sqlite"])
def test_a_plain_study_is_guided_and_ends_by_itself(tmp_path: Path, kept: str, database: Database) -> None:
    """`study.optimize` makes the trials of `find_best_split`, in any storage, and stops when
    nothing is left to gain."""
    problem, alike = JOBS[SOME[0]](), JOBS[SOME[0]]()
    study = optimize(problem, database(f"sqlite:///{tmp_path / 'own.db'}") if kept == "sqlite" else None)
    result = search(alike, max_trials=40)
    assert problem.measured == alike.measured
    assert len(study.trials) == len(problem.measured) < 40
    assert result.stopped in ("converged", "space exhausted")
    assert all(trial.user_attrs["reason"] for trial in study.trials)


def test_a_plain_study_goes_on_where_it_was(tmp_path: Path, database: Database) -> None:
    """A study that was stopped early, and is optimized again by another sampler, ends as an uninterrupted one."""
    whole, parts = JOBS[SOME[1]](), JOBS[SOME[1]]()
    optimize(whole)
    storage = f"sqlite:///{tmp_path / 'own.db'}"
    optimize(parts, database(storage), n_trials=2)
    optimize(parts, database(storage))
    assert parts.measured == whole.measured


def test_out_of_memory_is_a_pruned_trial_of_a_plain_study() -> None:
    """A split that did not run is PRUNED, is learned from, and the study goes on."""
    problem = job([card_memory(is_first=True, total=450), *[card_memory(total=100)] * 3], B=8)
    study = optimize(problem)
    states = {trial.state.name for trial in study.trials}
    assert states == {"COMPLETE", "PRUNED"}
    assert split_of(problem.space(), study.best_params).shard_sizes[1:] == (0, 0, 0)
    assert len(set(problem.measured)) == len(problem.measured)


def test_asked_for_more_it_gives_the_best_once_more() -> None:
    """Who asks and tells, and goes on after the end, is given the best split again, and the reason says so."""
    problem = job(2, B=4)
    study = optimize(problem)
    sampler = study.sampler
    assert isinstance(sampler, GuidedSampler)
    params = study.ask(distributions_of(problem.space())).params
    assert split_of(problem.space(), params) == split_of(problem.space(), study.best_params)
    assert sampler.reason == "nothing is left to gain: the best once more"


def test_other_parameters_are_refused() -> None:
    """A parameter that is none of a split's is no business of this sampler."""
    sampler = GuidedSampler(SplitSpace(global_batch_size=8, num_devices=2))
    study = optuna.create_study(sampler=sampler)
    with pytest.raises(ValueError, match="'lr': expected only accumulation_steps, gpu0_share, by suggest_split"):
        study.ask().suggest_float("lr", 0, 1)


# --- other shapes of a search ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("B", "num_devices"), [(1, 1), (2, 2), (3, 2), (8, 1)])
def test_the_best_of_a_tiny_space_is_found(B: int, num_devices: int) -> None:
    """Of a handful of splits none is measured twice, and the best is among those that were."""
    problem = job(num_devices, B=B)
    result = search(problem, max_trials=20)
    assert len(set(problem.measured)) == len(problem.measured)
    assert problem.throughput(result.best.split) == pytest.approx(problem.best_throughput)


def test_what_a_failure_rules_out_is_not_tried_in_a_tiny_space() -> None:
    """3 samples are not put where 2 ran out of memory, though two cards of three samples have few splits."""
    problem = job([card_memory(is_first=True, sample=200), card_memory(sample=200, total=450)], B=3)
    result = search(problem, max_trials=20)
    assert not (split(3, 1, 1, 2) in problem.measured and split(3, 1, 0, 3) in problem.measured)
    assert problem.throughput(result.best.split) == pytest.approx(problem.best_throughput)


def test_every_card_gets_the_least_share_demanded() -> None:
    """With `min_shard_size`, as batch norm needs, no split gives a card less."""
    problem = job(4, B=64)
    space = replace(problem.space(), min_shard_size=3)
    result = find_best_split(space, problem.measure)
    assert min(min(one.shard_sizes) for one in problem.measured) >= 3
    assert result.baseline is not None
    assert result.baseline.split == split(64, 1, 16, 16, 16, 16)


def test_one_device_needs_only_its_accumulation_steps() -> None:
    """On a single card the search is for the fewest steps that fit."""
    problem = job([card_memory(is_first=True, sample=100, total=3000)], B=64)
    result = search(problem)
    assert result.best.split == problem.best_split()
    assert problem.num_oom == 0


def test_no_trial_takes_more_steps_than_allowed() -> None:
    """A limit on accumulation steps holds for every trial, the first included."""
    problem = job(2, B=64)
    find_best_split(replace(problem.space(), max_accumulation_steps=4), problem.measure)
    assert max(one.accumulation_steps for one in problem.measured) <= 4


def test_a_job_without_memory_readings_is_searched() -> None:
    """Where nobody reads memory the search goes by time, and by failures alone."""
    problem = job(4, B=64)

    def blind(tried: BatchSplit) -> Measurement:
        return replace(problem.measure(tried), memory=())

    result = find_best_split(problem.space(), blind)
    assert problem.throughput(result.best.split) == pytest.approx(problem.best_throughput, rel=0.01)


def reasons(result: SearchResult) -> Sequence[str]:
    return [trial.reason for trial in result.trials if trial.kind == "search"]


def test_every_trial_says_why() -> None:
    """The first is a safe start, the next look for the baseline, then predictions with the memory
    they leave are given."""
    problem = job(
        [card_memory(is_first=True, sample=30, total=900, parameters=150), *[card_memory(sample=30)] * 3], B=128
    )
    told = reasons(search(problem))
    assert told[0] == "the smallest even split: a safe start"
    assert any("looking for the baseline" in reason for reason in told)
    assert any(reason.startswith("predicted ") and "GPU 0 at most at " in reason for reason in told)


def test_the_search_converges_before_its_budget_where_nothing_is_to_gain() -> None:
    """On cards alike with room for everything the even split is the best, and few trials show it."""
    problem = job(4, B=256)
    result = search(problem, max_trials=100)
    assert result.stopped == "converged"
    assert len(problem.measured) < 13
    assert problem.throughput(result.best.split) == pytest.approx(problem.best_throughput, rel=0.01)


def test_a_search_whose_models_were_contradicted_has_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends all the same, when nothing is expected to be faster, and says that its models disagreed."""
    problem = job(4, B=256)
    monkeypatch.setattr("splittune.search.policies.proposer.SIGNIFICANT", 0.0)
    assert search(problem, max_trials=100).stopped == "models disagree"
