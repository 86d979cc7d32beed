from __future__ import annotations

from dataclasses import replace

import pytest

from splittune.search.policies.base import MAX_TINY
from splittune.search.policies.measure_all import MeasureAll
from tests.search.policies.story import search, state_after
from tests.search.problem import MIB, card_memory, even, job


def test_of_a_tiny_space_all_that_may_fit_is_measured() -> None:
    """Memory jumps at 5 samples: the line through the small sizes rules none of the larger ones
    out, and the best is found."""
    card = replace(card_memory(is_first=True, sample=100, total=2400), jump_at=5, jump=300.0 * MIB)
    problem = job([card], B=16)
    proposals, trials = search(problem)
    assert {one.kind for one in proposals[1:]} == {"measure all"}
    assert max(trial.throughput for trial in trials) == pytest.approx(problem.best_throughput)


def test_a_larger_space_is_left_to_the_models() -> None:
    """Of 16 samples over two cards there are more splits than trials."""
    state = state_after(job(2, B=16), [even(16, 8, 2)])
    assert len(state.tables.listed) > MAX_TINY
    assert MeasureAll().propose(state) is None
