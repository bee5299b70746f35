"""Small helpers over "one run of rows a rank" columns."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TOLERANCE: Final = 1e-9
"""Idle time below this part of the makespan is rounding, not idle time."""


def per_rank(ufunc: np.ufunc, values: NDArray[np.generic], offsets: NDArray[np.int64], empty: float) -> Floats:
    """`ufunc.reduce` over the rows of each rank; `empty` for a rank without rows."""
    result = np.full(len(offsets) - 1, empty, dtype=np.float64)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        result[filled] = ufunc.reduceat(values, offsets[filled])
    return result


def firsts(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first row of each rank that has rows."""
    return offsets[:-1][np.diff(offsets) > 0]
