"""All linear models that agree with the trials: their extremes bound what was not measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.spatial import HalfspaceIntersection, QhullError

from splittune.search.arrays import FloatArray

# Where bounds contradict each other, each gives way by this many times the slack that is needed. A
# choice above 1: at exactly 1 only a point or an edge agrees, and what it predicts has no width.
WIDENING = 1.5
# Bounds and signs are loosened by this part of the largest bound: Qhull needs a set with an inside.
THINNEST = 1e-7
# A misfit up to this is the rounding of the linear program, and no bound gives way.
ROUNDING = 1e-9
# The misfit that is told where the linear program has no solution: worse than any real one.
UNSOLVED_MISFIT = 1e3
# Divisor in place of a largest bound of 0.
LEAST_UNIT = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Rows ``least <= x @ theta <= most``; `slack` is the unit in which each may give way.

    `rows` is (R, C) for C coefficients theta, the others are (R,). Infinite bounds do not bind.
    """

    rows: FloatArray
    least: FloatArray
    most: FloatArray
    slack: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Polytope:
    """The set of non-negative coefficients that agree with some bounds, by its corners.

    Worked: a reading of 6 at a size of 2 bounds ``a + b x size`` by the corners (0, 0), (6, 0) and
    (0, 3). At a size of 4 the corners give 0, 6 and 12, so the sum is 12 at most.
    """

    corners: FloatArray
    """(number of corners, number of coefficients)"""
    centre: FloatArray
    """The coefficients furthest inside."""
    misfit: float
    """How many times their slack the bounds had to give way to agree; 0 where they do."""

    def of_first(self, count: int) -> Polytope:
        """The polytope of the first `count` coefficients; the others are taken to be 0."""
        return Polytope(corners=self.corners[:, :count], centre=self.centre[:count], misfit=self.misfit)

    def lowest(self, rows: FloatArray) -> FloatArray:
        """The least ``x @ theta`` for each row."""
        return np.asarray((rows @ self.corners.T).min(axis=1))

    def highest(self, rows: FloatArray) -> FloatArray:
        """The most ``x @ theta`` for each row."""
        return np.asarray((rows @ self.corners.T).max(axis=1))

    def likely(self, rows: FloatArray) -> FloatArray:
        """``x @ theta`` at the centre, for each row."""
        return np.asarray(rows @ self.centre)


class ConstraintRows:
    """Collects the rows of a `Bounds`, a few at a time, in the order in which they are added."""

    def __init__(self) -> None:
        self._parts: list[Bounds] = []

    def add(
        self,
        rows: FloatArray,
        *,
        least: FloatArray | float = -np.inf,
        most: FloatArray | float = np.inf,
        slack: FloatArray | float,
    ) -> None:
        """Add ``least <= rows @ theta <= most``: `rows` (R, C), the others (R,) or one for all."""
        each = np.ones(len(rows))
        self._parts.append(Bounds(rows=rows, least=least * each, most=most * each, slack=slack * each))

    def bounds(self) -> Bounds:
        """All rows added so far."""
        return Bounds(
            rows=np.concatenate([part.rows for part in self._parts]),
            least=np.concatenate([part.least for part in self._parts]),
            most=np.concatenate([part.most for part in self._parts]),
            slack=np.concatenate([part.slack for part in self._parts]),
        )


def agreeing_with(bounds: Bounds) -> Polytope:
    """The non-negative coefficients that agree with `bounds`.

    Where none do, each bound gives way by as much of its slack as is needed; `Polytope.misfit` says
    how much. Every coefficient must appear in some row with a finite `most`, or the set has no end.
    """
    scale = np.abs(bounds.rows).max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    unit = max(float(bounds.most[np.isfinite(bounds.most)].max()), LEAST_UNIT)
    rows = bounds.rows / scale
    is_above, is_below = np.isfinite(bounds.least), np.isfinite(bounds.most)
    matrix = np.concatenate([rows[is_below], -rows[is_above]])
    limits = np.concatenate([bounds.most[is_below], -bounds.least[is_above]]) / unit
    slack = np.concatenate([bounds.slack[is_below], bounds.slack[is_above]]) / unit
    misfit, (centre, halfspaces) = 0.0, _centre(matrix, limits + THINNEST)
    if centre is None:
        misfit = _misfit(matrix, limits, slack)
        given = slack * (WIDENING * misfit if misfit > ROUNDING else 0.0) + THINNEST
        centre, halfspaces = _centre(matrix, limits + given)
    if centre is None:
        centre = np.zeros(matrix.shape[1])
    corners = _corners(halfspaces, centre)
    return Polytope(corners=corners / scale * unit, centre=centre / scale * unit, misfit=misfit)


def _misfit(matrix: FloatArray, limits: FloatArray, slack: FloatArray) -> float:
    """The least t for which ``matrix @ theta <= limits + t x slack`` has a solution."""
    num_coefficients = matrix.shape[1]
    cost = np.zeros(num_coefficients + 1)
    cost[-1] = 1
    solved = linprog(cost, A_ub=np.hstack([matrix, -slack[:, None]]), b_ub=limits, bounds=(0, None), method="highs")
    return float(solved.x[-1]) if solved.x is not None else UNSOLVED_MISFIT


def _centre(matrix: FloatArray, limits: FloatArray) -> tuple[FloatArray | None, FloatArray]:
    """The centre of the largest ball inside, (C,), and all halfspaces ``A x + b <= 0``, (H, C + 1).

    The centre is None where nothing is inside. The halfspaces include those that keep the
    coefficients from being negative.
    """
    num_coefficients = matrix.shape[1]
    matrix = np.vstack([matrix, -np.eye(num_coefficients)])
    limits = np.concatenate([limits, np.full(num_coefficients, THINNEST)])
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
    centre = None if solved.x is None else solved.x[:-1]
    return centre, np.hstack([matrix, -limits[:, None]])


def _corners(halfspaces: FloatArray, centre: FloatArray) -> FloatArray:
    """(K, C) where the halfspaces meet; the centre alone where the set is as good as a point."""
    try:
        with np.errstate(divide="ignore", invalid="ignore"):  # corners without an end are left out below
            corners = HalfspaceIntersection(halfspaces, centre).intersections
    except QhullError:
        return np.maximum(centre, 0)[None]
    corners = corners[np.isfinite(corners).all(axis=1)]
    return np.maximum(corners, 0) if len(corners) else np.maximum(centre, 0)[None]
