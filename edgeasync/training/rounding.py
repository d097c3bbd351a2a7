"""Models whose own types have fewer digits than the float32 that is exchanged, such as bfloat16."""

from collections.abc import Callable

import numpy as np

from edgeasync.parameters import Vector


class Rounding:
    """What a model made of a vector that it took.

    An update is what local steps change. It must not contain the difference between a value and its rounded form:
    steps that change nothing then make an update of exactly zero.

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
        """Compare a vector, float32 (n,), with what `read` copies from the model that has just taken it."""
        held = np.empty_like(vector)
        read(held)
        self._both = None if np.array_equal(held, vector) else (vector.copy(), held)

    def undo(self, vector: Vector) -> None:
        """Turn values read from the model, in place, into the vector that it took plus what has changed since."""
        if self._both is not None:
            taken, held = self._both
            vector -= held
            vector += taken
