"""The arrays that loaders give and models return: numpy's, with the method that programs for a GPU call."""

from typing import Any

import numpy as np
import numpy.typing as npt


class Array(np.ndarray[Any, np.dtype[Any]]):
    """A numpy array with `.to(device)`.

    >>> from edgeasync.async_train.arrays import as_array
    >>> as_array([1.0, 2.0]).to("cpu").sum().item()
    3.0
    """

    origin: Any = None
    """Of a model's scores: the model and the inputs. Arrays that are computed from them have none."""

    def to(self, device: object = None, **_: object) -> "Array":  # noqa: ARG002 - there is one device
        """Return this array: it is on the CPU, as all are."""
        return self


def as_array(values: npt.ArrayLike) -> Array:
    """Return values as such an array; an array is not copied."""
    return np.asarray(values).view(Array)
