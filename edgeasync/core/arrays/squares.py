"""Sums of squares, for norms on hub and device."""

import numpy as np

from edgeasync.parameters import Vector

ROW = 1 << 12
"""How many squares are summed at once: few enough for float32, and for BLAS to use one thread."""


def square_sum_of(values: Vector) -> float:
    """Return the sum of the squares, in rows that are short enough for float32 sums."""
    if values.size <= ROW:
        return float(np.vdot(values, values))
    whole = values.size - values.size % ROW
    rows = values[:whole].reshape(-1, ROW)
    return float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.vdot(values[whole:], values[whole:]))
