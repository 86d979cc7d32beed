"""All linear models that agree with what was measured: their extremes bound what was not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.spatial import HalfspaceIntersection, QhullError

Floats = NDArray[np.float64]

_WIDENING = 1.5
_THINNEST = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Rows ``x @ theta <= most`` and ``x @ theta >= least``, of which `slack` says how much each may be missed by."""

    rows: Floats
    least: Floats
    most: Floats
    slack: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Polytope:
    """The set of non-negative coefficients that agree with some bounds, by its corners.

    Example: one reading of 6 at a size of 2 bounds ``a + b x size`` by the corners (0, 0), (6, 0) and (0, 3), so that at
    a size of 4 the sum is 12 at most.
    """

    corners: Floats
    """(number of corners, number of coefficients)"""
    centre: Floats
    """The coefficients furthest inside."""
    misfit: float
    """By how much of their slack the bounds had to give way before anything agreed with all; 0 where nothing had to."""

    def of_first(self, count: int) -> Polytope:
        """What is left when the coefficients after the first `count` play no part."""
        return Polytope(corners=self.corners[:, :count], centre=self.centre[:count], misfit=self.misfit)

    def lowest(self, rows: Floats) -> Floats:
        """The least ``x @ theta`` for each row."""
        return np.asarray((rows @ self.corners.T).min(axis=1))

    def highest(self, rows: Floats) -> Floats:
        """The most ``x @ theta`` for each row."""
        return np.asarray((rows @ self.corners.T).max(axis=1))

    def likely(self, rows: Floats) -> Floats:
        """``x @ theta`` at the centre."""
        return np.asarray(rows @ self.centre)


def agreeing_with(bounds: Bounds) -> Polytope:
    """The coefficients that agree with `bounds`; where none do, each bound gives way by as much of its slack as needed.

    Every coefficient must appear in some row with a finite `most`, or the set would have no end.
    """
    scale = np.abs(bounds.rows).max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    unit = max(float(bounds.most[np.isfinite(bounds.most)].max()), 1e-300)
    rows = bounds.rows / scale
    is_above, is_below = np.isfinite(bounds.least), np.isfinite(bounds.most)
    matrix = np.concatenate([rows[is_below], -rows[is_above]])
    limits = np.concatenate([bounds.most[is_below], -bounds.least[is_above]]) / unit
    slack = np.concatenate([bounds.slack[is_below], bounds.slack[is_above]]) / unit
    misfit = _misfit(matrix, limits, slack)
    given = slack * (_WIDENING * misfit if misfit > 1e-9 else 0.0) + _THINNEST
    centre, halfspaces = _centre(matrix, limits + given)
    corners = _corners(halfspaces, centre)
    return Polytope(corners=corners / scale * unit, centre=centre / scale * unit, misfit=misfit)


def _misfit(matrix: Floats, limits: Floats, slack: Floats) -> float:
    """The least t for which ``matrix @ theta <= limits + t x slack`` has a solution."""
    num_coefficients = matrix.shape[1]
    cost = np.zeros(num_coefficients + 1)
    cost[-1] = 1
    solved = linprog(cost, A_ub=np.hstack([matrix, -slack[:, None]]), b_ub=limits, bounds=(0, None), method="highs")
    return float(solved.x[-1]) if solved.x is not None else 1e3


def _centre(matrix: Floats, limits: Floats) -> tuple[Floats, Floats]:
    """The middle of the largest ball inside, and all halfspaces ``A x + b <= 0``, signs of the coefficients included."""
    num_coefficients = matrix.shape[1]
    matrix = np.vstack([matrix, -np.eye(num_coefficients)])
    limits = np.concatenate([limits, np.full(num_coefficients, _THINNEST)])
    norms = np.linalg.norm(matrix, axis=1)
    cost = np.zeros(num_coefficients + 1)
    cost[-1] = -1
    solved = linprog(
        cost,
        A_ub=np.hstack([matrix, norms[:, None]]),
        b_ub=limits,
        bounds=[(None, None)] * num_coefficients + [(0, None)],
        method="highs",
    )
    centre = np.zeros(num_coefficients) if solved.x is None else solved.x[:-1]
    return centre, np.hstack([matrix, -limits[:, None]])


def _corners(halfspaces: Floats, centre: Floats) -> Floats:
    try:
        with np.errstate(divide="ignore", invalid="ignore"):  # corners without an end are left out below
            corners = HalfspaceIntersection(halfspaces, centre).intersections
    except QhullError:  # as good as a point
        return np.maximum(centre, 0)[None]
    corners = corners[np.isfinite(corners).all(axis=1)]
    return np.maximum(corners, 0) if len(corners) else np.maximum(centre, 0)[None]
