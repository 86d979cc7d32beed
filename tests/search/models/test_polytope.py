from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from splittune.search.models.polytope import Bounds, ConstraintRows, Polytope, agreeing_with

Floats = NDArray[np.float64]


def agreeing(rows: list[list[float]], least: list[float], most: list[float], slack: float = 0.01) -> Polytope:
    bounds = Bounds(rows=np.array(rows), least=np.array(least), most=np.array(most), slack=slack * np.ones(len(rows)))
    return agreeing_with(bounds)


@st.composite
def truths(draw: st.DrawFn) -> tuple[Floats, Floats, Floats, Floats]:
    """Coefficients, rows that all vary them, and how far below and above the truth each row is
    bounded.
    """
    width = draw(st.integers(2, 4))
    numbers = st.integers(0, 50)
    theta = np.array(draw(st.lists(numbers, min_size=width, max_size=width).filter(any)), dtype=float)
    extra = draw(st.lists(st.lists(numbers, min_size=width, max_size=width), max_size=5))
    rows = np.array([[1.0] * width, *extra], dtype=float)
    below, above = (
        np.array(draw(st.lists(st.sampled_from([0, 1, 20, np.inf]), min_size=len(rows), max_size=len(rows))))
        for _ in range(2)
    )
    above[0] = min(above[0], 100.0)  # an end for every coefficient
    return theta, rows, below, above


def test_one_reading_bounds_the_others_by_proportion() -> None:
    """A reading of 6 at a size of 2 leaves 0 to 12 at 4; that it is reached leaves 6 to 12."""
    wanted = np.array([[1.0, 4.0]])
    below = agreeing([[1.0, 2.0]], [-np.inf], [6.0])
    assert below.highest(wanted) == pytest.approx([12.0], abs=1e-4)
    assert below.lowest(wanted) == pytest.approx([0.0], abs=1e-4)
    reached = agreeing([[1.0, 2.0]], [6.0], [6.0])
    assert reached.highest(wanted) == pytest.approx([12.0], abs=1e-4)
    assert reached.lowest(wanted) == pytest.approx([6.0], abs=1e-4)


@given(truth=truths(), wanted=st.lists(st.integers(0, 100), min_size=4, max_size=4))
def test_what_agrees_is_within_the_extremes(truth: tuple[Floats, Floats, Floats, Floats], wanted: list[int]) -> None:
    """Coefficients that keep all bounds lie between the least and the most at any row, and so does
    the centre.
    """
    theta, rows, below, above = truth
    values = rows @ theta
    polytope = agreeing_with(
        Bounds(rows=rows, least=values - below, most=values + above, slack=np.full(len(rows), 0.01))
    )
    row = np.array([wanted[: len(theta)]], dtype=float)
    slack = 1e-4 * (1 + (values + above)[np.isfinite(above)].max()) * (1 + row.sum())
    assert polytope.misfit == pytest.approx(0, abs=1e-4)
    assert polytope.lowest(row)[0] <= float((row @ theta)[0]) + slack
    assert polytope.highest(row)[0] >= float((row @ theta)[0]) - slack
    assert polytope.lowest(row)[0] - slack <= polytope.likely(row)[0] <= polytope.highest(row)[0] + slack


@given(truth=truths())
def test_every_bound_narrows(truth: tuple[Floats, Floats, Floats, Floats]) -> None:
    """With one more bound the extremes move inwards, or stay."""
    theta, rows, below, above = truth
    values = rows @ theta
    wide = agreeing_with(
        Bounds(rows=rows[:1], least=values[:1] - below[:1], most=values[:1] + above[:1], slack=np.ones(1))
    )
    narrow = agreeing_with(Bounds(rows=rows, least=values - below, most=values + above, slack=np.ones(len(rows))))
    corners = np.eye(len(theta))
    slack = 1e-4 * (1 + (values + above)[np.isfinite(above)].max())
    assert (narrow.highest(corners) <= wide.highest(corners) + slack).all()
    assert (narrow.lowest(corners) >= wide.lowest(corners) - slack).all()


def test_as_many_exact_readings_as_coefficients_leave_a_point() -> None:
    """5 at a size of 1 and 9 at 3 are 3 + 2 x size, and nothing else."""
    polytope = agreeing([[1.0, 1.0], [1.0, 3.0]], [5.0, 9.0], [5.0, 9.0])
    wanted = np.array([[1.0, 100.0]])
    assert polytope.centre == pytest.approx([3.0, 2.0], abs=1e-4)
    assert polytope.lowest(wanted) == pytest.approx([203.0], rel=1e-3)
    assert polytope.highest(wanted) == pytest.approx([203.0], rel=1e-3)


def test_bounds_that_contradict_each_other_give_way_by_their_slack() -> None:
    """5 and 7 at the same size, each good for 0.5, agree when both give way twice that; the one
    with less gives less.
    """
    torn = agreeing([[1.0], [1.0]], [5.0, 7.0], [5.0, 7.0], slack=0.5)
    assert torn.misfit == pytest.approx(2.0, rel=1e-3)
    assert torn.centre == pytest.approx([6.0], abs=0.5)
    firm = agreeing_with(
        Bounds(
            rows=np.array([[1.0], [1.0]]),
            least=np.array([5.0, 7.0]),
            most=np.array([5.0, 7.0]),
            slack=np.array([0.01, 1.0]),
        )
    )
    assert firm.centre == pytest.approx([5.0], abs=0.1)


def test_rows_are_collected_in_the_order_in_which_they_are_added() -> None:
    """One number stands for all rows of a part, and what is not given does not bind."""
    constraints = ConstraintRows()
    constraints.add(np.eye(2), least=np.array([1.0, 2.0]), slack=0.5)
    constraints.add(np.array([[3.0, 4.0]]), most=7.0, slack=np.array([0.1]))
    bounds = constraints.bounds()
    assert bounds.rows.tolist() == [[1, 0], [0, 1], [3, 4]]
    assert bounds.least.tolist() == [1, 2, -np.inf]
    assert bounds.most.tolist() == [np.inf, np.inf, 7]
    assert bounds.slack.tolist() == [0.5, 0.5, 0.1]
