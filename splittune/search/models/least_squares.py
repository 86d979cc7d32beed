"""Non-negative least squares that always answers."""

from __future__ import annotations

import numpy as np
from scipy.optimize import lsq_linear, nnls

from splittune.search.arrays import FloatArray

# So many iterations of the active set for each column. A choice, ten times scipy's own, with which columns that explain
# one another exactly did not settle. Larger: longer until bounded least squares are asked instead.
ITERATIONS = 30


def non_negative(matrix: FloatArray, values: FloatArray) -> FloatArray:
    """(K,) coefficients, none negative, with which `matrix`, (R, K), comes nearest to `values`, (R,).

    Worked: a constant and a slope through 3, 2 and 1 at 1, 2 and 3 would fall; without a slope 2 is nearest.
    """
    try:
        solution, _ = nnls(matrix, values, maxiter=ITERATIONS * matrix.shape[1])
    except RuntimeError:  # rounding has it take a column in and give it back again
        # "bvls" and not the interior "trf", which divides by zero for columns of zeros; of unit columns, since it takes
        # a slope for none by what it is, not by what it explains.
        norms = np.linalg.norm(matrix, axis=0)
        norms[norms == 0.0] = 1.0
        bounds, most = (0.0, np.inf), ITERATIONS * matrix.shape[1]
        solution = np.maximum(lsq_linear(matrix / norms, values, bounds, method="bvls", max_iter=most).x, 0.0) / norms
    return np.asarray(solution)
