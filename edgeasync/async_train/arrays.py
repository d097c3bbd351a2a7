"""Numpy arrays with the method `to`, which programs for GPUs call on data and scores."""

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
    """For a model's scores: the model and its inputs. Arrays derived from scores have `None`."""

    def to(self, device: object = None, **_: object) -> "Array":  # noqa: ARG002 - arrays stay on the CPU
        """Return this array; all arrays are on the CPU."""
        return self


def as_array(values: npt.ArrayLike) -> Array:
    """Convert values to an `Array`; an array is not copied."""
    return np.asarray(values).view(Array)
