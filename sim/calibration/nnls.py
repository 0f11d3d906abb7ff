"""Non-negative least squares by numpy.

Knows no table and no sample. numpy is imported on use, never by a simulation.
"""

from __future__ import annotations

from typing import Any

from forge.errors import InvalidConfig

RIDGE = 1e-12
"""Ridge term, as a share of the squares."""


def import_numpy() -> Any:
    """Return numpy. Raises InvalidConfig where it is not installed."""
    try:
        import numpy
    except ModuleNotFoundError:
        raise InvalidConfig(
            "calibrate", "a fit needs numpy, which is not installed", "Install numpy"
        ) from None
    return numpy


def solve_nnls(matrix: Any, target: Any) -> Any:
    """Return the x >= 0 that minimizes |matrix x - target|.

    Negative elements are set to 0, and freed once more where that was too much: the active set
    method of Lawson and Hanson, started from the unconstrained solution.
    """
    np = import_numpy()
    size = matrix.shape[1]
    free = np.ones(size, bool)
    was_freed = np.zeros(size, bool)
    x = np.zeros(size)
    squares, products = matrix.T @ matrix, matrix.T @ target
    # Equal columns would be singular; with a ridge they share their value.
    squares[np.diag_indices(size)] += RIDGE * np.maximum(squares.diagonal(), RIDGE)
    for _ in range(4 * size + 1):
        x = np.zeros(size)
        if free.any():
            x[free] = np.linalg.solve(squares[np.ix_(free, free)], products[free])
        if (x < 0).any():
            free &= x >= 0
            continue
        gain = products - squares @ x
        gain[free | was_freed] = 0
        best = int(gain.argmax()) if size else 0
        if not size or gain[best] <= 1e-9 * float(np.abs(target).sum()):
            break
        free[best] = was_freed[best] = True
    return np.maximum(x, 0.0)
