"""Ranks that differ are told so before the first step, all of them, by name of rank."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import distributed_c10d

from splittune.ranks.agreement import differences, named
from tests.ranks.disagreements import (
    come_late,
    count_tokens,
    end_on_two_samples,
    evaluate_alone,
    look_ahead,
    shard,
    sum_of_ranks,
    wrap_in_new_group,
    wrap_or_shard,
)
from tests.ranks.pool import Pool, RankError


def wrapped(pool: Pool, *each: dict[str, Any] | None, backend: str | None = None) -> list[Any]:
    """What as many ranks as there are keywords answer; those without do not come."""
    padded = [*each, *[None] * (4 - len(each))]
    found = pool.run_each(wrap_in_new_group, [(len(each), backend, keywords) for keywords in padded])
    check_alive(pool)
    return found[: len(each)]


def sharded(pool: Pool, *each: dict[str, Any]) -> list[Any]:
    found = pool.run_each(shard, [(keywords,) for keywords in each])
    check_alive(pool)
    return found


def check_alive(pool: Pool) -> None:
    """No collective was left half done: the ranks can still work together."""
    assert pool.run(sum_of_ranks) == [6.0] * 4


def check_refused(found: list[Any], *parts: str) -> None:
    """Every rank has the same error, which says all of `parts`."""
    assert all(isinstance(answer, RankError) and answer.kind == "ConfigError" for answer in found), found
    assert len({answer.message for answer in found}) == 1
    for part in parts:
        assert part in found[0].message


def test_ranks_that_agree_go_on(pool: Pool) -> None:
    """Alike in all that counts, each rank gets its wrapper and its loader."""
    assert wrapped(pool, {}, {}, {}) == ["DistributedSplit"] * 3
    assert wrapped(pool, {}) == ["DistributedSplit"]
    assert sharded(pool, {}, {}, {}, {}) == ["2"] * 4


@pytest.mark.parametrize(
    ("each", "parts"),
    [
        ([{"shards": 3}] * 2, ["ranks 0 and 1: world size: got 2 ranks, expected 3, one for each device"]),
        ([{}, {"seed": 1}, {}], ["differ in the config", "'\"seed\": 0,' on ranks 0 and 2", "1,' on rank 1"]),
        ([{"model": "wider"}, {}], ["the model", "weight (5, 3) torch.float32' on rank 0", "(4, 3) torch"]),
        ([{}, {"model": "inside"}], ["config.wrap, rank 1: the model is wrapped already, in DataParallel"]),
        ([{"model": "DistributedDataParallel"}] * 4, ["ranks 0 to 3: the model is wrapped already, in Distributed"]),
        ([{"model": "BalancedDataParallel"}, {}], ["rank 0: the model is wrapped already, in BalancedDataParallel"]),
        ([{"model": "FSDPLinear"}] * 4, ["ranks 0 to 3: the model is wrapped already, in FSDPLinear"]),
        ([{"strategy": "dp"}] * 2, ["strategy='dp', one process for all 2 devices", 'replace(config, strategy="ddp")']),
        ([{}, {"ddp_options": {"find_unused_parameters": True}}], ["ddp_options", "find_unused_parameters=True, pro"]),
        ([{}, {"wrap_options": {"loss_fn": sum}}], ["differ in the loss", "'loss_fn given, weight_fn not given' on"]),
        ([{"wrap_options": {"devices": ["cpu", "cpu", "cpu"]}}, {}], ["rank 0: devices names 3: expected one"]),
        ([{"wrap_options": {"devices": "cuda:7"}}, {}], ["rank 0: cuda:7 is not there: this process sees 0 cards"]),
        ([{}, {"wrap_options": {"devices": "abacus"}}], ["rank 1: devices names 'abacus': expected a device of"]),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)  # fmt: skip
def test_wrapping_what_differs_is_refused_on_every_rank(pool: Pool, each: list[Any], parts: list[str]) -> None:
    """A world size, config, model, option, backend or device that cannot be: each rank says which rank has it."""
    check_refused(wrapped(pool, *each), *parts)


@pytest.mark.parametrize(
    ("each", "parts"),
    [
        ([{}, {}, {"samples": 97}, {}], ["samples in the data set: '96' on ranks 0, 1 and 3, '97' on rank 2"]),
        ([{}, {"batch_size": 24}, {}, {}], ["config.shard, rank 1: ", "24", "48"]),
        ([{}, {}, {}, {"seed": 5}], ["differ in seed: '0' on ranks 0 to 2, '5' on rank 3"]),
        ([{"throughput": 2.0}, {}, {}, {}], ["the config", "'\"throughput_samples_per_s\": 2.0,' on rank 0"]),
        ([{"drawn_by": 1}, {}, {}, {}], ["differ in state of the samplers", "on rank 0", "on ranks 1 to 3"]),
        ([{}, {"can_be_sharded": False}, {}, {}], ["config.shard, rank 1: loader is a list: expected a torch.utils"]),
        ([{"strategy": "dp"}, {}, {}, {}], ["config.shard, rank 0: this config says strategy='dp'"]),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else "",
)  # fmt: skip
def test_sharding_what_differs_is_refused_on_every_rank(pool: Pool, each: list[Any], parts: list[str]) -> None:
    """Data sets of different length, batch sizes, seeds, configs, or a loader that cannot be sharded on one rank."""
    check_refused(sharded(pool, *each), *parts)


def test_ranks_at_different_places_are_told_where(pool: Pool) -> None:
    """One rank wraps while the others shard: the calls of all are named."""
    found = pool.run_each(wrap_or_shard, [(False,), (True,), (False,), (False,)])
    check_refused(
        found, "'config.shard' on ranks 0, 2 and 3, 'config.wrap' on rank 1", "the same calls in the same order"
    )


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_is_named(pool: Pool, absent: int) -> None:
    """The other one does not hang: after the time given it says who is missing."""
    found = wrapped(pool, *[None if rank == absent else {"timeout_s": 0.5} for rank in range(2)])
    assert found.pop(absent) == "did not come"
    check_refused(found, f"config.wrap: rank {absent} of 2 has not come within 0.5 s", "give timeout_s")


def test_rank_0_says_for_whom_it_waits(pool: Pool) -> None:
    """Once that takes long, and nobody else does."""
    found = pool.run_each(come_late, [(False,), (True,), (False,), (True,)])
    assert found == [["config.wrap: waiting for ranks 1 and 3 of 4"], [], [], []]


def test_a_group_of_another_backend_is_refused(pool: Pool) -> None:
    """Ranks that train on the CPU cannot use a group for cards."""
    check_refused(wrapped(pool, {}, {}, backend="cuda:gloo"), "backend for cpu is None: expected gloo", "init_process_")


def test_ranks_are_named_in_runs() -> None:
    """One, a few, or a thousand of them: the message stays readable."""
    assert named([2]) == "rank 2"
    assert named([0, 1, 3]) == "ranks 0, 1 and 3"
    assert named([*range(7), 9]) == "ranks 0 to 6 and 9"
    assert named(range(1024)) == "ranks 0 to 1023"


def test_of_long_facts_the_first_unlike_line_is_quoted() -> None:
    """Two models that differ in one of many parameters are told apart by that one, also where one has more of them."""
    said = [
        {"stage": "s", "problem": None, "facts": [["the model", text, "Mend it."]]} for text in ("a\nb", "a\nc", "a")
    ]
    assert (
        differences(said)
        == "s: the ranks differ in the model: 'b' on rank 0, 'c' on rank 1, 'nothing' on rank 2. Mend it."
    )


def test_torch_gives_out_a_groups_store() -> None:
    """The one private function that is used is there; without it ranks could not compare what they have."""
    assert callable(distributed_c10d._get_process_group_store)


def test_a_rank_that_looked_ahead_is_named_before_the_first_step(pool: Pool) -> None:
    """It is an epoch further than the others, whose samples it would repeat; where all look ahead nothing is wrong."""
    found = pool.run_each(look_ahead, [(True,), (False,), (False,), (False,)])
    check_refused(found, "'epoch 1, batch 0' on rank 0", "'epoch 0, batch 0' on ranks 1 to 3", "set_epoch")
    assert pool.run_each(look_ahead, [(True,)] * 4) == ["trained"] * 4
    check_alive(pool)


def test_a_rank_evaluates_alone(pool: Pool) -> None:
    """With buffers, too, which DistributedDataParallel would give out in a collective."""
    assert pool.run_each(evaluate_alone, [(True,), (False,), (False,), (False,)]) == [1.0] * 4
    check_alive(pool)


def test_a_weight_fn_that_fails_on_one_rank_is_an_error_on_all(pool: Pool) -> None:
    """On its own rank it is the user's error, and the others hear of it at once; the ranks train on after it."""
    found = pool.run_each(count_tokens, [(False,), (False,), (True,), (False,)])
    failing = found.pop(2)
    assert (failing.kind, failing.message) == ("LookupError", "'no padding id'") or failing.message == "no padding id"
    check_refused(
        found, "config.micro_batches, rank 2: weight_fn could not count its batch: LookupError: no padding id"
    )
    assert pool.run_each(count_tokens, [(False,)] * 4) == ["trained"] * 4
    check_alive(pool)


def test_a_rank_prints_its_own_error_once(pool: Pool) -> None:
    """It stands in what all ranks raise; nothing is said to have happened during the handling of it."""
    own, _ = wrapped(pool, {"model": "DataParallel"}, {})
    assert own.trace.count("the model is wrapped already") == 1


def test_batch_norm_trains_on_a_last_batch_of_few_samples(pool: Pool) -> None:
    """Two samples on four ranks: one rank takes both, for of a single one BatchNorm has no variance."""
    losses = pool.run(end_on_two_samples)
    assert len(set(losses)) == 1
    assert losses[0] > 0
