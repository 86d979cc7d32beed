"""Balanced shares: they sum, they fit, and no others are done sooner."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittune.search.by_kind.balance import SLACK, balanced_totals
from splittune.split import spread_evenly
from tests.search.by_kind.cards import Line, least_time_s

LINES = st.builds(
    Line,
    count=st.integers(1, 3),
    a=st.floats(0, 0.01),
    b=st.floats(0.0005, 0.01),
    most=st.integers(0, 12),
)


def slowest_s(kinds: list[Line], totals: tuple[int, ...]) -> float:
    """Seconds until all are done, each kind's samples spread evenly over its cards."""
    return max(kind.time_s(max(spread_evenly(total, kind.count))) for kind, total in zip(kinds, totals, strict=True))


def test_the_worked_number() -> None:
    """101 samples on 2 cards of 1 ms a sample and 4 of 2 ms."""
    assert balanced_totals(101, [Line(2, 0.0, 1e-3, 1000), Line(4, 0.0, 2e-3, 1000)]) == (50, 51)


@given(kinds=st.lists(LINES, min_size=1, max_size=3), num_samples=st.integers(1, 40), least=st.integers(0, 2))
def test_no_other_shares_are_done_sooner(kinds: list[Line], num_samples: int, least: int) -> None:
    """Beside all ways to share the samples out; None exactly where none keeps the limits."""

    def keeps(totals: tuple[int, ...]) -> bool:
        parts = [spread_evenly(total, kind.count) for total, kind in zip(totals, kinds, strict=True)]
        return all(min(part) >= least and max(part) <= kind.most for part, kind in zip(parts, kinds, strict=True))

    ways = product(*(range(min(num_samples, kind.count * kind.most) + 1) for kind in kinds))
    legal = [totals for totals in ways if sum(totals) == num_samples and keeps(totals)]
    found = balanced_totals(num_samples, kinds, least=least)
    if not legal:
        assert found is None
        return
    assert found is not None
    assert sum(found) == num_samples
    assert keeps(found)
    assert slowest_s(kinds, found) <= min(slowest_s(kinds, totals) for totals in legal) * (1 + SLACK) + 1e-12


def test_with_many_samples_it_is_the_closed_form() -> None:
    """Four kinds of 256 cards, of very different speed: the slowest is within a sample of the least time."""
    kinds = [Line(256, 2e-3, each, 10**6) for each in (8e-3, 4e-3, 2e-3, 1e-3)]
    found = balanced_totals(10**6, kinds, least=1)
    assert found is not None
    assert slowest_s(kinds, found) <= least_time_s(10**6, kinds) + max(kind.b for kind in kinds)


def test_where_nothing_but_launches_take_time_the_faster_have_more() -> None:
    """All are done in the same time with any share up to their own limit: shares are in proportion to those."""
    kinds = [Line(1, 1.0, 1e-9, 1000), Line(1, 1.0, 1e-9, 3000)]
    assert balanced_totals(400, kinds) == pytest.approx((100, 300), abs=1)
