"""Non-negative least squares that always answers."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from splittune.search.models import least_squares
from splittune.search.models.least_squares import non_negative

# Micro-steps that all took as long: a constant explains them, and shares and further devices explain nothing beside it.
SHARES = (2.0358, 10.1790, 48.8591, 77.3602, 77.3602, 37.0535, 42.9040, 43.8791, 83.4676)
FURTHER = (4, 4, 4, 4, 0, 3, 4, 4, 4)


def test_a_fall_is_no_slope() -> None:
    """3, 2 and 1 at 1, 2 and 3: without a slope 2 is nearest."""
    matrix = np.column_stack([np.ones(3), [1.0, 2.0, 3.0]])
    assert non_negative(matrix, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2, 0])


def test_columns_that_explain_nothing_more_are_answered() -> None:
    """Scipy's own number of iterations is not enough here, or only just, by the rounding of the machine."""
    matrix = np.column_stack([np.full(9, 0.9750918184781326), SHARES, 0.9750918184781326 * np.array(FURTHER)])
    for values in (np.ones(9), np.full(9, 3.0)):
        assert matrix @ non_negative(matrix, values) == pytest.approx(values)


@given(rows=st.lists(st.tuples(*[st.floats(0, 100) for _ in range(3)]), min_size=1, max_size=12))
def test_bounded_least_squares_are_as_near_where_the_active_set_does_not_settle(rows) -> None:  # type: ignore[no-untyped-def]
    """Whatever the rows: no coefficient is negative, and the error is no larger than with those of the active set."""
    matrix = np.column_stack([np.ones(len(rows)), np.array(rows)[:, :2]])
    values = np.array(rows)[:, 2]
    with patch.object(least_squares, "nnls", side_effect=RuntimeError("Maximum number of iterations reached.")):
        solution = non_negative(matrix, values)
    _, error = nnls(matrix, values, maxiter=1000)
    assert (solution >= 0).all()
    assert np.linalg.norm(matrix @ solution - values) <= error + 1e-4 * (1 + np.linalg.norm(values))
