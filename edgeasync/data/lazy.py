"""Datasets that read examples only when a batch is drawn.

They are for data that does not fit into memory, and for random augmentation.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from edgeasync.data.dataset import Dataset
from edgeasync.errors import DataError


class Samples(Protocol):
    """A dataset indexed by number, such as those of torch and `edgeasync.async_train.data`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Return the example at `index` and its target."""


class LazyExamples:
    """An array-like of examples that reads each row when it is indexed."""

    def __init__(self, samples: Samples, shape: tuple[int, ...]) -> None:
        self._samples = samples
        self.shape = (len(samples), *shape)
        self.ndim = len(self.shape)
        self.dtype = np.dtype(np.float32)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Sequence[int]) -> npt.NDArray[np.float32]:
        chosen = range(len(self))[rows] if isinstance(rows, slice) else [int(row) for row in rows]
        found = np.empty((len(chosen), *self.shape[1:]), np.float32)
        for place, row in enumerate(chosen):
            example = np.atleast_1d(np.asarray(self._samples[row][0], np.float32))
            if example.shape != self.shape[1:]:
                raise DataError(
                    f"example {row}: its shape is {example.shape}, but example 0 has {self.shape[1:]}; all "
                    "examples must have the same shape"
                )
            found[place] = example
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:  # noqa: FBT001
        if copy is False:
            raise ValueError("lazy examples cannot be converted to an array without a copy")
        return self[:].astype(dtype or np.float32, copy=False)


def from_samples(samples: Samples) -> Dataset:
    """Create a dataset that reads each example whenever a batch contains it.

    `samples` has a length, and returns an example and its target by index, as torch's datasets do.
    Random augmentation in it differs in each epoch. The targets come from `samples.targets` if that
    exists and `samples` has no `target_transform`. Otherwise this function reads every example
    once. Raises `DataError` if `samples` is empty.

    >>> from edgeasync.data import from_samples
    >>> data = from_samples([([0.5, 1.0], 0), ([1.5, 2.0], 1)])
    >>> data.features[[1]].tolist(), data.y.tolist()
    ([[1.5, 2.0]], [0, 1])
    """
    if not len(samples):
        raise DataError("the dataset has no examples; add at least one")
    targets = getattr(samples, "targets", None)
    # In torchvision's datasets `targets` are those before a `target_transform`.
    changed = getattr(samples, "target_transform", None) is not None
    if targets is None or changed or len(targets) != len(samples):
        targets = [samples[number][1] for number in range(len(samples))]
    first = np.asarray(samples[0][0], np.float32)
    # Check the targets with small placeholder examples.
    y = Dataset.of(np.zeros((len(samples), 1), np.float32), np.asarray(targets), where="the dataset").y
    return Dataset(cast(npt.NDArray[np.float32], LazyExamples(samples, np.atleast_1d(first).shape)), y)
