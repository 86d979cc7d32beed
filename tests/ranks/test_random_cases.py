"""A third of the benchmark's 3,000 random cases: one device's batches on any number of ranks, resumed ones included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.distributed import batches
from benchmarks.distributed.batches import SAMPLERS, Case, Judged, complaint_about, judge, main
from splittune.ranks import draws, loader, sampler
from splittune.split import RankPart


def test_every_sample_once_in_the_batches_of_one_device() -> None:
    """In 1,000 cases no share differs from what the rule, written again, makes of torch's own batches."""
    judged = judge(1000)
    assert judged.failures == []
    assert judged.num_cases == 1000
    assert judged.num_resumed > 300
    assert judged.num_idle > 10_000
    assert set(judged.of_sampler) == set(SAMPLERS)


def other_shards(rank_part: Callable[..., RankPart]) -> Callable[..., RankPart]:
    """A rule that gives the first samples of a batch to the last rank."""
    return lambda num_samples, split, rank: rank_part(num_samples, split, split.num_devices - 1 - rank)


@pytest.mark.parametrize(
    ("module", "name", "replacement"),
    [
        (sampler, "rank_part", other_shards(sampler.rank_part)),
        (draws.GlobalRandom, "put_in_place", lambda self: None),
        (loader.ShardedLoader, "_seed_workers", lambda self, draws: None),
        (sampler.SameOrder, "begin", lambda self, draws, num_skipped: setattr(self, "_draws", draws)),
        (loader.OrderSources, "put_back", lambda self, states: None),
    ],
    ids=["shards in another order", "draws of the rank's own", "no draw for workers", "nothing skipped", "no state"],
)
def test_the_judge_finds_a_fault(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, replacement: Any) -> None:
    """Each of the parts that a loader depends on is missed where it is broken."""
    assert judge(40).failures == []
    monkeypatch.setattr(module, name, replacement)
    assert judge(40).failures


def test_it_prints_the_cases_and_their_failures(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """With the seed; and exits with 1 where a case failed."""
    assert main(["12", "5"]) == 0
    assert capsys.readouterr().out.startswith("12 random cases (seed 5), ")
    monkeypatch.setattr(batches, "complaint_about", lambda case, judged: "step 0: wrong")
    assert main(["2"]) == 1
    printed = capsys.readouterr().out
    assert "2 failures" in printed
    assert printed.count("step 0: wrong") == 2


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case, larger than the random ones are; it shrinks."""
    batch_size = draw(st.integers(1, 40))
    steps = draw(st.integers(1, batch_size))
    shares = [
        draw(st.lists(st.integers(0, draw(st.integers(0, 5))), min_size=size, max_size=size))
        for size in [-(-batch_size // steps)] * 2
    ]
    first, later = (tuple(owners.count(rank) for rank in range(max(owners) + 1)) for owners in shares)
    sampler = draw(st.sampled_from(SAMPLERS))
    return Case(
        num_samples=draw(st.integers(batch_size if sampler == "whole batches" else 1, 100)),
        batch_size=batch_size,
        accumulation_steps=steps,
        shard_sizes=first,
        later_shard_sizes=later,
        sampler=sampler,
        drop_last=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
        stop_epoch=draw(st.integers(0, 1)),
        stop_step=draw(st.integers(0, 5)),
    )


@pytest.mark.filterwarnings("ignore:.*is read in full by each:UserWarning")
@given(case=cases())
def test_the_batches_of_any_case_are_those_of_one_device(case: Case) -> None:
    """For any split, batch, sampler, number of ranks and step at which training is broken off."""
    assert complaint_about(case, Judged()) is None
