"""Examples that are read when they are drawn: data too large for memory, or changed at random each time."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from edgeasync.data.dataset import Dataset
from edgeasync.errors import DataError


class Samples(Protocol):
    """Examples by number: what torch's datasets are, and `edgeasync.async_train.data`'s."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Return an example and its target."""


class LazyExamples:
    """Stands where an array of examples stands, and reads the rows that are asked for."""

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
                    f"example {row}: shape {example.shape}, the first has {self.shape[1:]}; make them alike"
                )
            found[place] = example
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:  # noqa: FBT001
        if copy is False:
            raise ValueError("examples that are read when they are drawn cannot be given without a copy")
        return self[:].astype(dtype or np.float32, copy=False)


def from_samples(samples: Samples) -> Dataset:
    """Return a dataset that reads each example when it is drawn, and again each time.

    `samples` has a length, and gives an example and its target by number, as torch's datasets do. What it changes
    at random is different in each pass. Its targets are those in `targets`, if it has them and no
    `target_transform`; otherwise each example is read once to learn its target. Raises `DataError` if there is no
    example.

    >>> from edgeasync.data import from_samples
    >>> data = from_samples([([0.5, 1.0], 0), ([1.5, 2.0], 1)])
    >>> data.features[[1]].tolist(), data.y.tolist()
    ([[1.5, 2.0]], [0, 1])
    """
    if not len(samples):
        raise DataError("the dataset has no examples; give at least one")
    targets = getattr(samples, "targets", None)
    # A `target_transform` makes others of them, as torchvision's datasets do.
    changed = getattr(samples, "target_transform", None) is not None
    if targets is None or changed or len(targets) != len(samples):
        targets = [samples[number][1] for number in range(len(samples))]
    first = np.asarray(samples[0][0], np.float32)
    # The targets are checked beside examples that cost nothing.
    y = Dataset.of(np.zeros((len(samples), 1), np.float32), np.asarray(targets), where="the dataset").y
    return Dataset(cast(npt.NDArray[np.float32], LazyExamples(samples, np.atleast_1d(first).shape)), y)
