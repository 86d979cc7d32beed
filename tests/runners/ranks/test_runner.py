"""Ranks that measure: each its share on a card of its own, all together in synchronised steps, and what goes wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.ranks.pool import Pool, pool_of
from tests.runners.ranks.host import UPDATE_S, tuned_on_hosts

SPEEDS = (0.0002, 0.0006)
OPTIONS: dict[str, Any] = {"global_batch_size": 96, "max_trials": 5}


def test_the_slower_card_gets_the_smaller_share(pool: Pool, tmp_path: Path) -> None:
    """All ranks have the result; it was measured in synchronised steps, says who is slowest, and on which machine."""
    found = pool.run(tuned_on_hosts, SPEEDS, OPTIONS | {"max_trials": 8})
    assert [(words, is_as_found) for _, _, words, is_as_found in found] == [("", True)] * 2
    first, second = (result for result, *_ in found)
    assert first is not None
    assert first == second
    assert first.config.strategy == "ddp"
    assert not first.config.is_modelled
    quick, slow = first.best.split.shard_sizes
    assert max(quick, 3 * slow) <= 1.02 * 72  # three times as slow, a third as much: 72 and 24, to 2 %
    assert len(first.best.whole_step_times_s) == 5
    assert re.search(r"The slowest rank is [01], host[01] on \S+: its micro-steps take", first.explanation)
    assert "The all-reduce of" in first.explanation
    assert "modelled" not in first.explanation
    first.save(tmp_path)
    table = pd.read_csv(tmp_path / "devices.csv")
    assert list(table["rank"]) == [0, 1] * len(first.trials)
    assert table["node"].nunique() == 1


def test_no_figure_of_a_trial_includes_the_agreement(pool: Pool) -> None:
    """Ranks for which each one takes a thousand seconds measure what they measure without; but for the last digits."""
    quick, slow = (pool.run(tuned_on_hosts, SPEEDS, OPTIONS, fault)[0][0] for fault in ((), ("slow agreement",) * 2))
    assert quick is not None
    assert slow is not None
    assert len(quick.trials) > 3
    for one, other in zip(quick.trials, slow.trials, strict=True):
        assert one.measurement.split == other.measurement.split
        assert one.kind == other.kind
        for name in ("micro_step_times_s", "update_times_s", "unbroken_round_times_s", "whole_step_times_s"):
            times_s = getattr(one.measurement, name)
            assert getattr(other.measurement, name) == pytest.approx(times_s, rel=1e-3)
    assert any(trial.measurement.whole_step_times_s for trial in slow.trials)


@pytest.mark.parametrize("rank", [None, 1])
def test_a_synchronised_step_that_was_skipped_is_run_again(pool: Pool, rank: int | None) -> None:
    """On all ranks, also where one alone skips it: the times are of steps that were taken, and a note says so."""
    found = pool.run(tuned_on_hosts, SPEEDS, OPTIONS, (), ((2, 5, 6), rank))
    assert [words for _, _, words, _ in found] == ["", ""]
    first, second = (result for result, *_ in found)
    assert first is not None
    assert first == second
    best = first.best
    assert len(best.whole_step_times_s) == 5
    assert max(best.whole_step_times_s) - min(best.whole_step_times_s) < UPDATE_S / 2
    assert best.notes[-1] == "3 steps were skipped by the gradient scaler, whose scale was too large, and not timed."


def test_a_rank_that_runs_out_of_memory_costs_a_trial(pool: Pool) -> None:
    """By itself, so nobody waits for it: 96 samples want more than a card has."""
    found = pool.run(tuned_on_hosts, (0.0, 0.0), OPTIONS | {"global_batch_size": 300, "max_trials": 12})
    for result, _, words, is_as_found in found:
        assert is_as_found, words
        assert result is not None, words
        outcomes = {trial.measurement.outcome.value for trial in result.trials}
        assert outcomes <= {"ok", "no_headroom", "out_of_memory"}
        assert max(result.best.split.shard_sizes) < 90
        failed = [trial.measurement for trial in result.trials if trial.measurement.outcome.value == "out_of_memory"]
        assert all(re.match(r"device [01]: CUDA out of memory", each.message) for each in failed)


def test_the_users_exception_in_a_synchronised_step_is_every_ranks(pool: Pool) -> None:
    """The others are in a collective with it: they are freed, and told what it was."""
    for _, kind, words, is_as_found in pool.run(tuned_on_hosts, (0.0, 0.0), OPTIONS, ("", "own")):
        assert (kind, words) == ("LookupError", "the user's own")
        assert is_as_found


def test_out_of_memory_in_a_synchronised_step_ends_the_ranks(pool: Pool, tmp_path: Path) -> None:
    """In one of them, though it fitted: all are told, and started again they leave that split alone."""
    options = OPTIONS | {"storage": tmp_path / "trials.journal"}
    for _, kind, words, is_as_found in pool.run(tuned_on_hosts, (0.0, 0.0), options, ("", "out of memory")):
        assert kind == "RanksError"
        assert "could not be finished: rank 0, Connection closed by peer" in words
        assert "; rank 1, out of memory, though it fitted by itself" in words
        assert is_as_found
    assert (tmp_path / "trials.journal.trial").exists()
    for result, _, words, _ in pool.run(tuned_on_hosts, (0.0, 0.0), options):
        assert result is not None, words
        crashed = [trial for trial in result.trials if trial.measurement.outcome.value == "crashed"]
        assert [trial.kind for trial in crashed] == ["confirm"]
        assert result.best.split != crashed[0].measurement.split
    assert not (tmp_path / "trials.journal.trial").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_for_its_answer_ends_the_ranks(pool: Pool, rank: int) -> None:
    """It raises that, and the other that it was lost; the job is as it was found on both, and their group of use."""
    found = pool.run(tuned_on_hosts, (0.0, 0.0), OPTIONS, tuple("agreement" if at == rank else "" for at in range(2)))
    assert found[rank][1:] == ("MemoryError", "no room for an answer", True)
    assert found[1 - rank][1] == "RanksError"
    assert found[1 - rank][3]


def test_two_ranks_on_one_card_are_named(pool: Pool) -> None:
    """By its UUID, before the first trial."""
    for _, kind, words, is_as_found in pool.run(tuned_on_hosts, (0.0, 0.0), OPTIONS, ("shared", "shared")):
        assert kind == "DeviceError"
        assert re.match(r"ranks 0 and 1 have the same card, host1 \(GPU-0\)", words)
        assert is_as_found


@pytest.mark.parametrize(("fault", "words"), [("kill", "Connection closed by peer"), ("hang", "Timed out waiting")])
def test_a_lost_rank_ends_it_on_those_that_are_left(tmp_path: Path, fault: str, words: str) -> None:
    """Killed or hung in a forward: after the stated wait at most, with the job as it was found, and the trial noted."""
    options = OPTIONS | {"trial_timeout_s": 8.0, "storage": tmp_path / "trials.journal"}
    with pool_of(3, tmp_path) as ranks:
        ranks.start(tuned_on_hosts, [((0.0,) * 3, options, ("", fault, ""))] * 3)
        for rank in (0, 2):
            _, kind, said, is_as_found = ranks.answer_of(rank)
            assert kind == "RanksError"
            assert f"a rank was lost, or has not come within 8 s ({words}" in said
            assert is_as_found
        ranks.kill()
    assert '"begun": "{' in (tmp_path / "trials.journal.trial").read_text()
