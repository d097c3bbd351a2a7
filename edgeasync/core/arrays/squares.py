"""Sums of squares, for norms on the hub and on devices."""

import numpy as np

from edgeasync.parameters import Vector

ROW = 1 << 12
"""Number of squares that are summed at once. It is small enough for the precision of float32, and
for BLAS to use one thread.
"""


def square_sum_of(values: Vector) -> float:
    """Return the sum of the squares.

    The squares are summed in rows that are short enough for the precision of float32.
    """
    if values.size <= ROW:
        return float(np.vdot(values, values))
    whole = values.size - values.size % ROW
    rows = values[:whole].reshape(-1, ROW)
    return float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.vdot(values[whole:], values[whole:]))
