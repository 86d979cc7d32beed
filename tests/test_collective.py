"""autotune() as a collective: real processes on virtual cards, one of which each takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splittune import TuneResult
from splittune.errors import RanksError
from splittune.runners.ranks.journal import TrialJournal
from tests.ranks.pool import Pool, RankError, pool_of
from tests.runners.ranks.jobs import refused, tables, tuned, tuned_normed, tuned_with


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two ranks."""
    with pool_of(2, tmp_path_factory.mktemp("collective")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone() -> TuneResult:
    """What one process finds on the same cards."""
    return tuned(None)


def test_all_ranks_have_the_result_of_one_process(pool: Pool, alone: TuneResult) -> None:
    """The same trials to the last digit, though each card's were run by its rank."""
    for result in pool.run(tuned):
        assert tables(result) == tables(alone)
        assert result.config.split == alone.config.split
        assert result.explanation == alone.explanation


@pytest.mark.parametrize(("size", "least"), [(32, 4), (6, 3)])
def test_batch_norm_is_never_given_a_single_sample(pool: Pool, size: int, least: int) -> None:
    """It refuses one in training: on ranks and in one process, no trial has less than the least share."""
    alone = tuned_normed(None, size)
    assert all(min(trial.measurement.split.shard_sizes) >= least for trial in alone.trials)
    assert [tables(result) for result in pool.run(tuned_normed, size)] == [tables(alone)] * 2


def test_a_search_goes_on_from_its_storage(pool: Pool, alone: TuneResult, tmp_path: Path) -> None:
    """One cut short in the middle of a line comes to the same trials, and runs only what is missing."""
    storage = tmp_path / "deep" / "trials.jsonl"
    given = [({"storage": storage},), ({"storage": "/proc/nowhere"},)]  # the other rank's is not asked
    first = pool.run_each(tuned_with, given)[0]
    lines = storage.read_bytes().splitlines(keepends=True)
    storage.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    again = pool.run_each(tuned_with, given)[1]
    assert tables(first) == tables(again) == tables(alone)
    assert len(storage.read_bytes().splitlines()) == len(lines) + 1
    assert [path.name for path in storage.parent.iterdir()] == ["trials.jsonl"]


def test_a_split_that_lost_ranks_before_is_left_alone(pool: Pool, alone: TuneResult, tmp_path: Path) -> None:
    """The journal's trial counts as crashed, and the search ends with another split."""
    storage = tmp_path / "trials.jsonl"
    best = alone.best.split
    trial = {
        "phase": "a split",
        "shares": best.shard_sizes,
        "accumulation_steps": min(best.accumulation_steps, 3),
        "in_full": (False, False),
        "scripts_hold": True,
    }
    journal = TrialJournal.beside(storage)
    with pytest.raises(RanksError), journal.running(trial):
        raise RanksError("rank 1 was killed")
    result = pool.run(tuned_with, {"storage": storage})[1]
    crashed = [trial for trial in result.trials if trial.measurement.outcome == "crashed"]
    assert [trial.measurement.split for trial in crashed] == [best]
    assert "ranks were lost in this trial once" in crashed[0].measurement.message
    assert result.best.split != best


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_of_the_users_ends_it_on_all_ranks(pool: Pool, rank: int) -> None:
    """With its type and words, the job as it was found, and the group still of use."""
    for kind, words, is_as_found, works in pool.run(refused, rank, 0):
        assert kind == "LookupError"
        assert "samples are too many for me" in words
        assert is_as_found
        assert works


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 256}, r"the ranks differ in the model: '0.weight \(512, 512\).* on rank 0, '0.weight \(256, 256\)"),
        ({"global_batch_size": 2048}, "the ranks differ in the batch size: '4096' on rank 0, '2048' on rank 1"),
        ({"seed": 3}, "the ranks differ in the seed: '0' on rank 0, '3' on rank 1"),
        ({"max_trials": 5}, "the ranks differ in the options"),
        ({"devices": "2xT4"}, "the ranks differ in the devices"),
        (
            {"versions": {"torch": "1.0"}},
            r"the ranks differ in the version of torch: '2\..*' on rank 0, '1.0' on rank 1. I",
        ),
        (
            {"versions": {"splittune": "9"}},
            "the ranks differ in the version of splittune: .* on rank 0, '9' on rank 1. I",
        ),
        ({"is_scaled": True}, "the ranks differ in the gradient scaler: 'none' on rank 0, 'given' on rank 1"),
        ({"devices": "3xT4"}, "rank 1: devices names 3 cards, and the process group has 2 ranks"),
        ({"devices": "1xT4"}, "rank 1: devices names 1 card, and the process group has 2 ranks"),
        ({"strategy": "either"}, 'rank 1: strategy is "either" in a process group of 2 ranks'),
        ({"timeout_s": 3.0}, "rank 1: timeout_s is 3.0 on virtual cards under ranks"),
    ],
)
def test_ranks_that_differ_are_named_on_all_of_them(pool: Pool, options: dict[str, Any], words: str) -> None:
    """Before the first trial."""
    errors = pool.run_each(tuned_with, [({},), (options,)])
    for error in errors:
        assert isinstance(error, RankError)
        assert error.kind == "ConfigError"
        assert re.search(words, error.message), error.message
