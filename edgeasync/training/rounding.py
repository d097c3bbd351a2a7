"""Removes from updates the rounding errors of models in low precision, such as bfloat16."""

from collections.abc import Callable

import numpy as np

from edgeasync.parameters import Vector


class Rounding:
    """The rounding error of a low-precision model that was loaded from a float32 vector.

    An update should contain only the changes made by local steps. Without this class, an update
    would also contain the rounding error, so even steps that change nothing would change the hub's
    model.

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
        """Compute the difference between the loaded `vector`, float32 (n,), and the model.

        `read` copies the model's values to a float32 vector.
        """
        held = np.empty_like(vector)
        read(held)
        self._both = None if np.array_equal(held, vector) else (vector.copy(), held)

    def undo(self, vector: Vector) -> None:
        """Remove the rounding error from `vector`, which was read from the model, in place.

        Afterwards, `vector` equals the loaded vector plus all changes that the model has made
        since.
        """
        if self._both is None:
            return
        loaded, held = self._both
        unchanged = (vector == held) | (np.isnan(vector) & np.isnan(held))
        with np.errstate(invalid="ignore"):  # a float16 model turns 100,000 into infinity
            vector -= held
            vector += loaded
        np.copyto(vector, loaded, where=unchanged)
