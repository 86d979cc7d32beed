"""The likeliest peak at sizes a little beyond those measured: a plane, where one explains them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from splittune.search.arrays import FloatArray
from splittune.search.models.envelope import Points

# A plane explains peaks that it is off by at most this part. A choice, above twice the repeatability of a peak.
TOLERANCE = 0.005
# It is told from so many peaks. A choice: two always lie on a line.
FEWEST = 3
# It tells of sizes up to so many times as large as the largest that it explains. Counted on 646 problems: up to there
# 92 of 100 splits ran that a plane let run, at 1.6 to 2.1 times the sizes 67. Larger: more risks are taken.
FARTHEST = 1.6


@dataclass(frozen=True, slots=True)
class Plane:
    """A peak as one line ``F + beta s + omega m`` of `Envelope`, which explains the largest peaks.

    Worked: peaks of 3, 4 and 5 GiB with 1, 2 and 3 samples lie on ``2 + s``, so with 4 samples it is 6 GiB. Of 5,
    which are more than 1.6 times 3, it says nothing.
    """

    coefficients: FloatArray
    """(3,) F, beta and omega."""
    largest: FloatArray
    """(2,) the largest sizes that it explains."""

    @classmethod
    def through(cls, points: Points) -> Plane | None:
        """The plane through the largest peaks, as many as it explains; None where it explains too few.

        A smaller peak may be of another phase of the step.
        """
        order = np.argsort(points.num_bytes, kind="stable")
        sizes, num_bytes = points.sizes[order], points.num_bytes[order]
        for first in range(len(sizes)):
            rows = np.column_stack([np.ones(len(sizes) - first), sizes[first:]])
            scale = np.maximum(rows.max(axis=0), 1.0)
            scaled = rows / scale
            if len(np.unique(rows, axis=0)) < max(FEWEST, np.linalg.matrix_rank(scaled)):
                return None
            relative = scaled / num_bytes[first:, None]
            solution, _ = nnls(relative, np.ones(len(relative)))
            if np.abs(relative @ solution - 1).max() <= TOLERANCE:
                return cls(solution / scale, sizes[first:].max(axis=0))
        return None

    @property
    def slope(self) -> float:
        """beta: bytes for each sample of the device's share."""
        return float(self.coefficients[1])

    def __call__(self, sizes: FloatArray) -> FloatArray:
        """(N,) bytes for `sizes` (N, 2); infinite where they are too far from what was measured."""
        num_bytes = np.column_stack([np.ones(len(sizes)), sizes]) @ self.coefficients
        return np.where((sizes <= FARTHEST * self.largest).all(axis=1), num_bytes, np.inf)
