"""Keep rounding errors of low-precision models, such as bfloat16, out of their updates."""

from collections.abc import Callable

import numpy as np

from edgeasync.parameters import Vector


class Rounding:
    """The rounding that happened when a model loaded a float32 vector.

    An update is what local steps change. Without this class it would also contain the rounding error, and steps
    that change nothing would move the hub.

    >>> import numpy as np
    >>> held = np.zeros(2, np.float16)
    >>> vector = np.array([0.1, 0.2], np.float32)
    >>> held[:] = vector
    >>> rounding = Rounding(vector, lambda values: np.copyto(values, held))
    >>> found = held.astype(np.float32)
    >>> rounding.undo(found)
    >>> bool((found == vector).all())
    True
    """

    def __init__(self, vector: Vector, read: Callable[[Vector], None]) -> None:
        """Compare a vector, float32 (n,), with what `read` copies back from the model that has just loaded it."""
        held = np.empty_like(vector)
        read(held)
        self._both = None if np.array_equal(held, vector) else (vector.copy(), held)

    def undo(self, vector: Vector) -> None:
        """Turn values read from the model, in place, into the loaded vector plus what has changed since."""
        if self._both is None:
            return
        loaded, held = self._both
        unchanged = (vector == held) | (np.isnan(vector) & np.isnan(held))
        with np.errstate(invalid="ignore"):  # an infinite value is what a model of float16 makes of 100,000
            vector -= held
            vector += loaded
        np.copyto(vector, loaded, where=unchanged)
