"""Lazy datasets, for data that is too large for memory, or that is randomly augmented."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from edgeasync.data.dataset import Dataset
from edgeasync.errors import DataError


class Samples(Protocol):
    """Examples by index, such as a torch `Dataset` or a dataset of `edgeasync.async_train.data`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Return an example and its target."""


class LazyExamples:
    """A stand-in for an array of examples that reads rows only when they are requested."""

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
                    f"example {row} has shape {example.shape}, but the first has shape {self.shape[1:]}; use "
                    "the same shape for every example"
                )
            found[place] = example
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:  # noqa: FBT001
        if copy is False:
            raise ValueError(
                "lazily read examples cannot be converted to an array without a copy; omit copy=False"
            )
        return self[:].astype(dtype or np.float32, copy=False)


def from_samples(samples: Samples) -> Dataset:
    """Return a dataset that reads an example each time the example is drawn.

    `samples` needs a length, and must return an example and its target by index, as torch datasets
    do. So random augmentations differ each time. If `samples` has an attribute `targets` and no
    `target_transform`, the targets are copied from this attribute. Otherwise, every example is read
    once at the start to find its target. Raises `DataError` if there are no examples.

    >>> from edgeasync.data import from_samples
    >>> data = from_samples([([0.5, 1.0], 0), ([1.5, 2.0], 1)])
    >>> data.features[[1]].tolist(), data.y.tolist()
    ([[1.5, 2.0]], [0, 1])
    """
    if not len(samples):
        raise DataError("the dataset has no examples; it needs at least one")
    targets = getattr(samples, "targets", None)
    # A `target_transform` changes the targets, as in torchvision's datasets.
    changed = getattr(samples, "target_transform", None) is not None
    if targets is None or changed or len(targets) != len(samples):
        targets = [samples[number][1] for number in range(len(samples))]
    first = np.asarray(samples[0][0], np.float32)
    # Check the targets with dummy examples.
    y = Dataset.of(np.zeros((len(samples), 1), np.float32), np.asarray(targets), where="the dataset").y
    return Dataset(cast(npt.NDArray[np.float32], LazyExamples(samples, np.atleast_1d(first).shape)), y)
