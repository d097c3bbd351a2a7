"""Dtype and shape of a graph's data inputs, and conversion of examples and targets to these."""

from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.data.dataset import check_shape
from edgeasync.errors import DataError, GraphError

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {"tensor(float)": np.dtype(np.float32), "tensor(int64)": np.dtype(np.int64)}


class InputForm(msgspec.Struct, frozen=True):
    """A graph input: its name, dtype and fixed batch size, if any, and the shape of one example."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int | None = None

    @classmethod
    def of(cls, entry: Any) -> Self:
        """Return the form of a session's input.

        Raises `GraphError` if a dataset cannot be converted to this form.
        """
        rows, *features = entry.shape or [0]
        fixed = all(isinstance(size, int) and size > 0 for size in features)
        if entry.type not in _DTYPES or rows == 0 or not fixed:
            raise GraphError(
                f"input {entry.name!r} is {entry.type} {entry.shape}; export the model with float32 or int64 "
                "inputs, whose only dynamic axis is the batch, axis 0"
            )
        return cls(entry.name, _DTYPES[entry.type], tuple(features), rows if isinstance(rows, int) else None)

    def check(self, values: Array, what: str) -> None:
        """Raise `DataError` unless the values can be converted to this form."""
        check_shape(values.shape[1:], self.shape, what)
        if self.dtype.kind == "i" and values.dtype.kind != "i" and (values != np.rint(values)).any():
            raise DataError(
                f"the data's {what} are not whole numbers, which the hub's model requires; convert them"
            )

    def bring(self, values: Array) -> Array:
        """Convert values to a contiguous array of this form. Copies them only if necessary."""
        return np.ascontiguousarray(values, self.dtype).reshape(len(values), *self.shape)
