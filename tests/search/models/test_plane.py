from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from splittune.search.models.envelope import Points
from splittune.search.models.plane import FARTHEST, FEWEST, Plane

SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(41, 200)), min_size=4, max_size=8, unique=True)


def told(rows: list[tuple[float, float, float]], *sizes: tuple[float, float]) -> np.ndarray | None:
    plane = Plane.through(Points.of(rows))
    return None if plane is None else plane(np.array(sizes, dtype=float))


@given(SIZES, st.floats(1, 1e3), st.floats(0, 50), st.floats(0, 5), st.floats(1, FARTHEST))
@settings(deadline=None)
def test_it_goes_on_as_the_readings_did(
    sizes: list[tuple[int, int]], fixed: float, beta: float, omega: float, further: float
) -> None:
    """Whatever the plane, it is found from any four readings on it, whose sizes differ in both, and holds to
    `FARTHEST`, on the ray of the largest."""
    rows = [(float(s), float(m), fixed + beta * s + omega * m) for s, m in sizes]
    assume(np.linalg.matrix_rank(np.array([(1, s, m) for s, m, _ in rows])) == 3)
    largest = max(rows, key=lambda row: row[2])[:2]
    wanted = largest[0] * further, largest[1] * further
    foretold = told(rows, wanted)
    assert foretold is not None
    assert foretold == pytest.approx(fixed + beta * wanted[0] + omega * wanted[1], rel=0.03)


def test_two_readings_always_lie_on_a_line() -> None:
    """They say nothing of a third."""
    rows = [(1.0, 0.0, 3.0), (2.0, 0.0, 4.0), (3.0, 0.0, 5.0)]
    assert told(rows, (4.0, 0.0)) == pytest.approx([6.0])
    assert told(rows[: FEWEST - 1], (4.0, 0.0)) is None


def test_it_says_nothing_of_sizes_far_away() -> None:
    """4.8 samples are 1.6 times 3; in the micro-batch as in the share."""
    rows = [(1.0, 4.0, 3.0), (2.0, 4.0, 4.0), (3.0, 4.0, 5.0), (3.0, 8.0, 7.0)]
    far = told(rows, (4.8, 8.0), (4.9, 8.0), (3.0, 12.8), (3.0, 12.9))
    assert far is not None
    assert np.isinf(far).tolist() == [False, True, False, True]


def test_smaller_peaks_may_be_of_another_phase() -> None:
    """Up to 4 samples another phase holds most: the line goes through the peaks beyond."""
    rows = [(1.0, 0.0, 9.0), (4.0, 0.0, 9.0), *((s, 0.0, 2 + 2 * s) for s in (5.0, 6.0, 8.0))]
    assert told(rows, (10.0, 0.0)) == pytest.approx([22.0])


def test_peaks_on_no_plane_have_none() -> None:
    """A jump of memory leaves too few on one line."""
    rows = [(1.0, 0.0, 3.0), (2.0, 0.0, 4.0), (3.0, 0.0, 9.0), (4.0, 0.0, 10.0)]
    assert told(rows, (5.0, 0.0)) is None
    assert told([], (5.0, 0.0)) is None
