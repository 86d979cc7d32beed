from __future__ import annotations

import numpy as np
import pytest

from splittune.search.models.memory_bounds import are_on_slope, coefficient_bounds
from splittune.search.models.memory_readings import ACCUMULATES, CONSTANT, REPEATABILITY, SHARE, Reading, row_of
from splittune.search.models.polytope import Bounds

FREE = (-np.inf, np.inf)


def reading(share: int, peak: int, resting: int | None, accumulates: float = 0.0) -> Reading:
    """Of a replica."""
    return Reading(row_of(1, share, 2 * share, accumulates), peak, resting)


def bounds(*readings: Reading, slope_range: tuple[float, float] = FREE, **full) -> Bounds:
    return coefficient_bounds(
        readings,
        full.get("full", ()),
        reached=are_on_slope(readings),
        slope_range=slope_range,
        largest_budget_bytes=10_000.0,
    )


def test_a_peak_above_the_flat_is_reached() -> None:
    """1000, 2000 and 4000 bytes: the flat need not be reached, the others are."""
    rows = bounds(reading(1, 1000, 0), reading(2, 2000, 0), reading(4, 4000, 0))
    assert rows.least[:3] == pytest.approx([-np.inf, 2000 * (1 - REPEATABILITY), 4000 * (1 - REPEATABILITY)])
    assert rows.most[:3] == pytest.approx(np.array([1000, 2000, 4000]) * (1 + REPEATABILITY))


def test_the_flat_is_told_for_each_kind_of_step() -> None:
    """1,000 bytes of single steps and 1,500 of accumulating ones are both flat; more than tolerance above is not."""
    single, more = [reading(1, 1000, 0), reading(4, 1003, 0)], [reading(1, 1500, 0, 1.0), reading(8, 1600, 0, 1.0)]
    assert are_on_slope([*single, *more]).tolist() == [False, False, False, True]


def test_a_peak_above_twice_what_is_held_at_rest_is_on_a_slope() -> None:
    """Parameters are held at rest, and their gradients are as large: 1,000 bytes with 400 at rest have samples in
    them, 1,000 with 600 may have none, and where nobody read what rests the flat alone tells."""
    assert are_on_slope([reading(1, 1000, 400)]).tolist() == [True]
    assert are_on_slope([reading(1, 1000, 600)]).tolist() == [False]
    assert are_on_slope([reading(1, 1000, None)]).tolist() == [False]


def test_a_constant_is_at_most_twice_what_is_held_at_rest() -> None:
    """600 bytes at rest bound it by 1,200, which gives way wholly; what nobody read bounds nothing."""
    rows = bounds(reading(1, 3000, 600), reading(2, 5000, None))
    assert rows.rows[4].tolist() == [1, 0, 0]
    assert (rows.most[4], rows.slack[4]) == (1200, 5000)
    assert len(rows.rows) == 2 + 2 + 1 + 3


def test_what_gpu0_holds_at_rest_of_the_last_outputs_is_no_constant() -> None:
    """1,652 bytes at rest before micro-batches of 4 and 2,216 before those of 13 are 1,401 without samples."""
    of_gpu0 = [Reading(row_of(0, 1, size, 1.0), 4000 + 300 * size, rest) for size, rest in ((4, 1652), (13, 2216))]
    rows = bounds(*of_gpu0)
    assert rows.least[2:4] == pytest.approx([1401.3 * (1 - REPEATABILITY)] * 2, rel=1e-3)
    assert rows.most[4:6] == pytest.approx([2 * 1401.3] * 2, rel=1e-3)
    alone = bounds(of_gpu0[0])
    assert alone.least[1] == pytest.approx(1652 * (1 - REPEATABILITY))


def test_what_is_known_at_rest_gives_way_as_readings_do_and_a_guess_wholly() -> None:
    """600 bytes at rest are a bound to 0.2 %; where nobody knows, half of the smallest peak, which
    gives way.
    """
    rows = bounds(reading(1, 1000, 600), reading(2, 2000, None))
    assert rows.rows[2:4].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert rows.least[2:4] == pytest.approx([600 * (1 - REPEATABILITY), 500])
    assert rows.slack[2:4] == pytest.approx([max(1.0, rows.least[2] * REPEATABILITY), 500])


def test_a_failure_bounds_its_row_from_below() -> None:
    """A device of 5000 bytes ran out of memory with 8 samples: they need that much."""
    rows = bounds(reading(1, 1000, 0), full=[(row_of(1, 8, 16, 0.0), 5000.0)])
    assert rows.rows[2].tolist() == [1, 8, 0]
    assert rows.least[2] == pytest.approx(5000 * (1 - REPEATABILITY))
    assert np.isinf(rows.most[2])


def test_every_coefficient_has_an_end() -> None:
    """No coefficient is more than a whole peak; one that is 0 in every reading ends at 0 or at the
    budget.
    """
    ends = bounds(reading(2, 1000, 0), reading(4, 1400, 0)).most[-3:]
    assert ends[[CONSTANT, SHARE, ACCUMULATES]].tolist() == [1400, 350, 0]
    both = bounds(reading(2, 1000, 0), reading(4, 1400, 0, accumulates=1.0)).most[-3:]
    assert both[ACCUMULATES] == 1400
    idle = coefficient_bounds(
        [Reading(row_of(0, 0, 8, 0.0), 900, 0)],
        (),
        reached=np.array([True]),
        slope_range=FREE,
        largest_budget_bytes=10_000.0,
    )
    assert idle.most[-4:][SHARE] == 10_000


def test_the_slope_keeps_within_its_range() -> None:
    """What another group of devices taught of a sample bounds it here."""
    rows = bounds(reading(2, 1000, 0), slope_range=(90.0, 110.0))
    assert (rows.least[-3:][SHARE], rows.most[-3:][SHARE]) == (90, 110)
