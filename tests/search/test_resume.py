from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import RDBStorage

from splittune.errors import ConfigError
from splittune.search import SAMPLER_NAMES, Trial, find_best_split
from splittune.search.samplers.parameters import distributions_of
from splittune.search.storage.records import read_judged_trials
from tests.search.problem import MIB, failing_after, linear_job

TIGHT = (550, 100_000, 100_000, 100_000)

STORAGES = ["study.db", "study.sqlite3", "study.log", "new/folder/study.log"]


@pytest.fixture
def stored(database: Callable[[str], RDBStorage]) -> Callable[..., optuna.Study]:
    """Opens a study in a database as Optuna's own users do."""

    def load(url: str, study_name: str = "splittune") -> optuna.Study:
        return optuna.create_study(
            storage=database(url), study_name=study_name, direction="maximize", load_if_exists=True
        )

    return load


@pytest.mark.parametrize("place", STORAGES)
def test_every_kind_of_storage_keeps_the_search(tmp_path: Path, place: str) -> None:
    """A path is SQLite or a journal by its ending; a second run with the same budget measures nothing."""
    first, second = linear_job(total_mib=TIGHT), linear_job(total_mib=TIGHT)
    result = find_best_split(first.space(), first.measure, max_trials=5, storage=tmp_path / place)
    again = find_best_split(second.space(), second.measure, max_trials=5, storage=tmp_path / place)
    assert again == result
    assert second.measured == []
    assert all(trial.is_resumed for trial in again.trials)


def test_an_optuna_url_is_taken_as_it_is(tmp_path: Path, stored: Callable[..., optuna.Study]) -> None:
    """Anything with :// is an Optuna URL."""
    url = f"sqlite:///{tmp_path / 'by-url'}"
    problem = linear_job(total_mib=TIGHT)
    result = find_best_split(problem.space(), problem.measure, max_trials=4, storage=url, study_name="mine")
    study = stored(url, "mine")
    assert len(study.trials) == 4
    assert result.best.split in {one.split for one in read_judged_trials(study)}


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
@pytest.mark.parametrize("stopped_after", [2, 5, 7])
def test_a_resumed_search_equals_an_uninterrupted_one(tmp_path: Path, sampler: str, stopped_after: int) -> None:
    """Stopped anywhere and resumed, the search makes the trials it would have made, and measures none twice."""
    whole, parts = linear_job(total_mib=TIGHT), linear_job(total_mib=TIGHT)
    storage = tmp_path / "study.log"
    expected = find_best_split(whole.space(), whole.measure, max_trials=12, sampler=sampler, seed=5)
    with pytest.raises(KeyboardInterrupt):
        find_best_split(
            parts.space(),
            failing_after(stopped_after, parts.measure, KeyboardInterrupt()),
            max_trials=12,
            sampler=sampler,
            seed=5,
            storage=storage,
        )
    seen: list[Trial] = []
    result = find_best_split(
        parts.space(), parts.measure, max_trials=12, sampler=sampler, seed=5, storage=storage, on_trial=seen.append
    )
    assert result == expected
    assert parts.measured == whole.measured
    assert [trial.is_resumed for trial in seen] == [number < stopped_after for number in range(len(seen))]


def test_a_search_with_a_larger_budget_goes_on_and_confirms_anew(tmp_path: Path) -> None:
    """More trials on the same storage give what one longer search would; old confirmations do not count."""
    whole, parts = linear_job(total_mib=TIGHT), linear_job(total_mib=TIGHT)
    storage = tmp_path / "study.log"
    find_best_split(parts.space(), parts.measure, max_trials=5, storage=storage)
    parts.measured.clear()
    result = find_best_split(parts.space(), parts.measure, max_trials=10, storage=storage)
    assert result == find_best_split(whole.space(), whole.measure, max_trials=10)
    assert parts.measured == whole.measured[5:]


def test_an_interrupted_confirmation_goes_on_where_it_was(tmp_path: Path) -> None:
    """Finalists that were confirmed before the interruption are not measured again."""
    whole, parts = linear_job(total_mib=TIGHT), linear_job(total_mib=TIGHT)
    storage = tmp_path / "study.log"
    expected = find_best_split(whole.space(), whole.measure, max_trials=6)
    stopping = failing_after(8, parts.measure, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        find_best_split(parts.space(), stopping, max_trials=6, storage=storage)
    assert find_best_split(parts.space(), parts.measure, max_trials=6, storage=storage) == expected
    assert parts.measured == whole.measured


class UserError(Exception):
    """Not one of ours."""


@pytest.mark.parametrize("error", [UserError("in your step"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exception_passes_unchanged_and_finished_trials_stay(
    tmp_path: Path, error: BaseException, stored: Callable[..., optuna.Study]
) -> None:
    """The very exception leaves; what was finished is in the storage and with the caller; the running trial is FAIL."""
    problem = linear_job(total_mib=TIGHT)
    seen: list[Trial] = []
    url = f"sqlite:///{tmp_path / 'study.db'}"
    with pytest.raises(type(error)) as raised:
        find_best_split(problem.space(), failing_after(3, problem.measure, error), storage=url, on_trial=seen.append)
    assert raised.value is error
    assert len(seen) == 3
    study = stored(url)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "COMPLETE", "FAIL"]
    assert [one.measurement for one in read_judged_trials(study)] == [trial.measurement for trial in seen]


def test_a_trial_left_running_by_a_killed_process_is_ignored(
    tmp_path: Path, stored: Callable[..., optuna.Study]
) -> None:
    """A trial that a killed run never finished does not count, and its split is measured."""
    whole, parts = linear_job(total_mib=TIGHT), linear_job(total_mib=TIGHT)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    find_best_split(parts.space(), parts.measure, max_trials=4, storage=storage)
    stored(storage).ask(distributions_of(parts.space()))
    result = find_best_split(parts.space(), parts.measure, max_trials=10, storage=storage)
    assert result == find_best_split(whole.space(), whole.measure, max_trials=10)


def test_trials_are_readable_as_optunas(tmp_path: Path, stored: Callable[..., optuna.Study]) -> None:
    """Each trial holds its split and reason; what lacks memory violates a constraint, what did not run is PRUNED."""
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    problem = linear_job(total_mib=TIGHT, oom="named")
    result = find_best_split(problem.space(), problem.measure, max_trials=6, storage=storage, sampler="random")
    study = stored(storage)
    first = study.trials[0]
    assert first.params == {"accumulation_steps": 1, "gpu0_share": 0.25}
    assert first.state is optuna.trial.TrialState.PRUNED
    assert first.user_attrs["shard_sizes"] == [16, 16, 16, 16]
    assert first.user_attrs["gpu0_bsz"] == 16
    assert first.user_attrs["reason"] == result.trials[0].reason
    assert first.constraints == {"device 0": 1.0, "out_of_memory": 1.0}
    assert study.best_value == pytest.approx(problem.throughput(result.best.split))


def test_a_split_without_headroom_is_complete_but_infeasible(
    tmp_path: Path, stored: Callable[..., optuna.Study]
) -> None:
    """A split that ran without headroom keeps its samples/s, and Optuna's best skips it."""
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    problem = linear_job(total_mib=TIGHT)
    find_best_split(problem.space(), problem.measure, max_trials=4, storage=storage, sampler="random")
    study = stored(storage)
    first = study.trials[0]
    assert first.state is optuna.trial.TrialState.COMPLETE
    assert first.constraints["device 0"] == pytest.approx((1600 - 550) / 550)
    assert first.constraints["device 1"] < 0
    assert first.value is not None
    assert first.value > study.best_value


def test_a_study_of_another_space_is_refused(tmp_path: Path) -> None:
    """Resuming with another batch names what differs and what to do."""
    storage = tmp_path / "study.log"
    problem = linear_job(total_mib=TIGHT)
    with pytest.raises(KeyboardInterrupt):
        find_best_split(problem.space(), failing_after(1, problem.measure, KeyboardInterrupt()), storage=storage)
    other = replace(problem, B=32, measured=[])
    with pytest.raises(ConfigError, match=r"global_batch_size is 64 there and 32 here.*another study_name or storage"):
        find_best_split(other.space(), other.measure, storage=storage)
    assert other.measured == []
    find_best_split(other.space(), other.measure, storage=storage, study_name="another", max_trials=6)


def test_stored_trials_are_judged_by_the_demand_of_today(tmp_path: Path) -> None:
    """A search that goes on with more headroom ends as one that demanded it from the start would judge its trials."""
    storage = tmp_path / "study.log"
    problem = linear_job(total_mib=TIGHT)
    lenient = find_best_split(problem.space(), problem.measure, storage=storage, max_trials=6)
    demand = min(memory.headroom_bytes for memory in lenient.best.memory) + MIB
    strict = find_best_split(
        problem.space(), problem.measure, storage=storage, max_trials=10, min_headroom_bytes=demand
    )
    assert [t.measurement.split for t in strict.trials[:6]] == [t.measurement.split for t in lenient.trials[:6]]
    assert min(memory.headroom_bytes for memory in strict.best.memory) >= demand
    again = find_best_split(problem.space(), problem.measure, storage=storage, max_trials=10)
    assert again.best.throughput >= strict.best.throughput


def test_a_study_of_another_program_is_refused(tmp_path: Path, stored: Callable[..., optuna.Study]) -> None:
    """A study with trials that splittune did not write is left alone."""
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    foreign = stored(storage, "mine")
    foreign.tell(foreign.ask({"x": optuna.distributions.IntDistribution(0, 3)}), 1.0)
    problem = linear_job()
    with pytest.raises(ConfigError, match=r"'mine' in .* was not written by splittune"):
        find_best_split(problem.space(), problem.measure, storage=storage, study_name="mine")
