"""Non-negative least squares that always answers."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import nnls

from splittune.search.models import least_squares
from splittune.search.models.least_squares import non_negative

# Shares and further devices over micro-steps that all took as long: a constant explains these, and both nothing more.
# With these very numbers scipy 1.17.1 gives up after its own number of iterations.
CONSTANT = 0.9750918184781326
SHARES = (
    2.0357943875826257,
    10.178971937913127,
    48.859065301983016,
    77.36018672813978,
    77.36018672813978,
    37.053489102169046,
    42.904040013037836,
    43.87913183151597,
    83.46756989088766,
)
FURTHER = (
    3.9003672739125306,
    3.9003672739125306,
    3.9003672739125306,
    3.9003672739125306,
    0.0,
    2.9252754554343983,
    3.9003672739125306,
    3.9003672739125306,
    3.9003672739125306,
)


def test_a_fall_is_no_slope() -> None:
    """3, 2 and 1 at 1, 2 and 3: without a slope 2 is nearest."""
    matrix = np.column_stack([np.ones(3), [1.0, 2.0, 3.0]])
    assert non_negative(matrix, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2, 0])


def test_columns_that_explain_nothing_more_are_answered() -> None:
    """They have no coefficient, and the constant explains all."""
    matrix = np.column_stack([np.full(len(SHARES), CONSTANT), SHARES, FURTHER])
    assert non_negative(matrix, np.ones(len(SHARES))) == pytest.approx([1 / CONSTANT, 0, 0], abs=1e-9)


# With these rows scipy's interior method multiplies infinity by zero.
@example(rows=[(1.0, 0.0, 1.0), (2.0, 0.0, 0.0)])
@given(rows=st.lists(st.tuples(*[st.just(0.0) | st.floats(1e-9, 100)] * 3), min_size=1, max_size=12))
def test_bounded_least_squares_are_as_near_where_the_active_set_does_not_settle(
    rows: list[tuple[float, float, float]],
) -> None:
    """Whatever the rows, zeros and eleven magnitudes: none is negative, the error no larger than the active set's."""
    matrix = np.column_stack([np.ones(len(rows)), np.array(rows)[:, :2]])
    values = np.array(rows)[:, 2]
    with patch.object(least_squares, "nnls", side_effect=RuntimeError("Maximum number of iterations reached.")):
        solution = non_negative(matrix, values)
    _, error = nnls(matrix, values, maxiter=1000)
    assert (solution >= 0).all()
    assert np.linalg.norm(matrix @ solution - values) <= error + 1e-4 * (1 + np.linalg.norm(values))
