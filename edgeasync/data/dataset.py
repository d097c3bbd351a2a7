"""Labelled examples held in memory, and the endless stream of batches that training draws from them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeasync.errors import ConfigError, DataError

Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
"""Examples float32 (batch, features...) and labels int64 (batch,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Examples `x`, float32 (n, features...), and labels `y`, int64 (n,); make one with `Dataset.of`."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]

    @classmethod
    def of(cls, x: npt.ArrayLike, y: npt.ArrayLike, *, where: str = "the data") -> "Dataset":
        """Check examples and labels and bring them to float32 and int64; arrays already so are not copied.

        Raises `DataError`, beginning with `where`, unless there is at least one example, as many labels as
        examples, every value is finite and every label an integer of 0 or more.
        """
        examples, labels = _array(x, "x", where), _array(y, "y", where)
        if examples.dtype.kind not in "biuf":
            raise DataError(f"{where}: x holds {examples.dtype} values; give real numbers")
        if labels.dtype.kind not in "iu":
            raise DataError(f"{where}: y holds {labels.dtype} values; give class numbers 0, 1, 2, ... as integers")
        if examples.ndim < 2:
            raise DataError(f"{where}: x has {examples.ndim} dimensions; give one row of features per example")
        if labels.ndim != 1:
            raise DataError(f"{where}: y has {labels.ndim} dimensions; give one label per example")
        if len(examples) != len(labels):
            raise DataError(f"{where}: {len(examples)} examples but {len(labels)} labels; give one label for each")
        if not examples.size:
            raise DataError(f"{where}: there are no values; give at least one example with at least one feature")
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.ascontiguousarray(examples, np.float32)
            # The extremes tell without a mask as long as the data: a NaN anywhere makes both NaN.
            finite = np.isfinite(values.min()) and np.isfinite(values.max())
        if not finite:
            raise DataError(f"{where}: x has values that are not finite in float32; remove or replace them")
        if labels.min() < 0:
            raise DataError(f"{where}: label {labels.min()} is negative; number the classes from 0")
        if labels.max() > np.iinfo(np.int64).max:
            raise DataError(f"{where}: label {labels.max()} is too large; number the classes from 0")
        return cls(values, np.ascontiguousarray(labels, np.int64))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: npt.NDArray[np.int64]) -> "Dataset":
        """Return a copy of the examples at `indices`, in that order."""
        return Dataset(self.x[indices], self.y[indices])


def batches(dataset: Dataset, batch_size: int, seed: int) -> Iterator[Batch]:
    """Draw batches for ever, each epoch in a fresh order; the same seed gives the same batches.

    A batch is never larger than the data; the last one of an epoch may be short.
    Raises `ConfigError` if `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; give 1 or more")
    return _endless(dataset, batch_size, np.random.Generator(np.random.PCG64(seed)))


def _endless(dataset: Dataset, batch_size: int, generator: np.random.Generator) -> Iterator[Batch]:
    while True:
        order = generator.permutation(len(dataset))
        for start in range(0, len(dataset), batch_size):
            chosen = order[start : start + batch_size]
            yield dataset.x[chosen], dataset.y[chosen]


def _array(values: npt.ArrayLike, name: str, where: str) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(f"{where}: {name} is not one array; give every example the same shape") from error
