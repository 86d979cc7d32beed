from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.profiling.measurement import Outcome
from splittune.search.candidates.generate import failures_on_alike, neighbours
from splittune.search.judged_trials import JudgedTrial
from splittune.search.models.memory import MemoryModel
from splittune.split import BatchSplit
from tests.search.problem import MIB, card_memory, even, job, split, trial

B = 64


def learned(*tried: BatchSplit) -> tuple[MemoryModel, list[JudgedTrial]]:
    """Four cards of one kind with room for 1,000 MiB, GPU 0 with room for anything."""
    cards = [card_memory(is_first=True, sample=40), *[card_memory(sample=40, total=1000)] * 3]
    problem = job(cards, B=B)
    trials = [trial(problem, one, (0, *[100 * MIB] * 3)) for one in tried]
    return MemoryModel(trials, 4), trials


def limits() -> tuple[float, ...]:
    return (1e12, *[900.0 * MIB] * 3)


def test_neighbours_move_one_sample_or_a_quarter() -> None:
    """(8, 4) has three: (7, 5), (6, 6) and (9, 3); a device that must have a share keeps it."""
    found = neighbours(split(12, 1, 8, 4), 0)
    assert found.splits() == [split(12, 1, 6, 6), split(12, 1, 7, 5), split(12, 1, 9, 3)]
    assert neighbours(split(3, 1, 2, 1), 1).splits() == [split(3, 1, 1, 2)]
    assert len(neighbours(split(1, 1, 1), 0)) == 0


@given(shards=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), least=st.integers(0, 1))
def test_neighbours_keep_the_batch_and_the_least_share(shards: list[int], least: int) -> None:
    """For any split: as many samples in as many steps, none below the least that had it, and never itself."""
    shards = [share + least for share in shards]
    one = split(3 * sum(shards), 3, *shards)
    for other in neighbours(one, least).splits():
        assert other != one
        assert (other.accumulation_steps, other.micro_batch_size) == (3, sum(shards))
        assert min(other.shard_sizes) >= least


def test_a_replica_that_lacked_memory_stands_for_its_kind() -> None:
    """GPU 1 kept no headroom with 18 of 33 samples: neither would GPU 2 or GPU 3, in a micro-batch
    of as little as 22."""
    model, trials = learned(even(B, 16, 4), split(B, 2, 8, 18, 3, 3))
    assert trials[1].measurement.outcome is Outcome.NO_HEADROOM
    failures = failures_on_alike(trials, model, limits())
    assert [failure.split for failure in failures] == [
        split(B, 3, 4, 18, 0, 0),
        split(B, 3, 4, 0, 18, 0),
        split(B, 3, 4, 0, 0, 18),
    ]
    assert [failure.oom_devices for failure in failures] == [{1}, {2}, {3}]
    assert any(failure.rules_out(split(B, 3, 2, 1, 18, 1)) for failure in failures)
    assert not any(failure.rules_out(split(B, 3, 2, 1, 17, 2)) for failure in failures)
    assert not any(failure.rules_out(split(B, 1, 8, 18, 18, 20)) for failure in failures)


def test_a_card_with_more_room_is_not_held_to_it() -> None:
    """GPU 3 has room for more than what was too much for GPU 1."""
    model, trials = learned(even(B, 16, 4), split(B, 2, 8, 18, 3, 3))
    failures = failures_on_alike(trials, model, (1e12, 900.0 * MIB, 900.0 * MIB, 2000.0 * MIB))
    assert [failure.oom_devices for failure in failures] == [{1}, {2}]


@pytest.mark.parametrize("oom_devices", [frozenset({0}), frozenset[int]()])
def test_gpu0_stands_for_none(oom_devices: frozenset[int]) -> None:
    """What GPU 0 lacked, or nobody knows who, says nothing of the others."""
    model, trials = learned(even(B, 16, 4), split(B, 2, 8, 18, 3, 3))
    assert failures_on_alike([replace(trials[1], oom_devices=oom_devices)], model, limits()) == []


def test_the_whole_batch_at_once_says_nothing_of_accumulation() -> None:
    """A failure in a single step holds for single steps and, being the lighter, for more."""
    model, trials = learned(even(B, 16, 4), split(B, 1, 38, 20, 3, 3))
    failures = failures_on_alike(trials, model, limits())
    assert {failure.split.accumulation_steps for failure in failures} == {1}
    assert any(failure.rules_out(split(B, 1, 40, 1, 20, 3)) for failure in failures)
