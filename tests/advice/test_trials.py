"""A few trials under a change: larger micro-batches in proportion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.advice.trials import Budget, BudgetSpentError, doubled
from splittune.split import BatchSplit


@given(st.data())
def test_any_split_is_doubled_to_a_legal_one(data: st.DataObject) -> None:
    """With half the steps, rounded up, the same global batch, and no card that was idle given samples."""
    size = data.draw(st.integers(1, 500))
    steps = data.draw(st.integers(1, size))
    num_devices = data.draw(st.integers(1, 6))
    split = BatchSplit.even(global_batch_size=size, accumulation_steps=steps, num_devices=num_devices)
    larger = doubled(split)
    assert larger.global_batch_size == size
    assert larger.accumulation_steps == -(-steps // 2)
    assert all(after == 0 for before, after in zip(split.shard_sizes, larger.shard_sizes, strict=True) if before == 0)


def test_shares_keep_their_proportion() -> None:
    """4 x (4+12) of 64 samples is 2 x (8+24)."""
    split = BatchSplit(global_batch_size=64, accumulation_steps=4, shard_sizes=(4, 12))
    assert doubled(split) == BatchSplit(global_batch_size=64, accumulation_steps=2, shard_sizes=(8, 24))


def test_a_budget_of_trials_does_not_count_those_apart() -> None:
    """Those on modelled ranks take no time to speak of."""
    budget = Budget(max_trials=2)
    budget.count_apart(5)
    budget.num_trials += 1
    budget.check()
    budget.num_trials += 1
    with pytest.raises(BudgetSpentError, match=r"\(2\)"):
        budget.check()
