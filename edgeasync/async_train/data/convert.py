"""Converts datasets, loaders and arrays to edgeasync's datasets."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from edgeasync.async_train.data.loader import DataLoader, take
from edgeasync.data import Dataset, from_samples, load
from edgeasync.errors import DataError


def as_dataset(data: Any) -> Dataset:
    """Convert data to an `edgeasync.Dataset`.

    - `DataLoader`: its dataset is used; the loader's order of examples is ignored.
    - Datasets with examples in files, such as `ImageFolder`: files are read during training, in
      every pass.
    - Other datasets: all examples are read once, with their transforms applied.
    - Other loaders, such as torch's: the batches of one pass are read once.
    - An `edgeasync.Dataset`, a pair of arrays or a file path: as for `edgeasync.train`.

    Raises `DataError` for anything else.

    >>> from edgeasync.async_train import data
    >>> data.as_dataset([([0.0, 1.0], 0), ([1.0, 0.0], 1)]).x.shape
    (2, 2)
    """
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str | Path):
        return load(Path(data).expanduser())
    if isinstance(data, tuple) and len(data) == 2:
        return Dataset.of(*data)
    if getattr(data, "lazy", False):
        return from_samples(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Dataset.of(*take(data, np.arange(len(data))))
    if isinstance(data, Iterable):
        return _read(data)
    raise DataError(f"data is {type(data).__name__}; pass a dataset, a loader, or a tuple (x, y) of arrays")


def batch_size_of(data: object) -> int | None:
    """Return the batch size of a loader, or `None` for anything else."""
    found = getattr(data, "batch_size", None)
    return found if isinstance(found, int) and found >= 1 else None


def _read(batches: Iterable[Any]) -> Dataset:
    """Read one pass of a loader; raises `DataError` unless it returns pairs."""
    xs, ys = [], []
    for batch in batches:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise DataError(f"the loader returns {type(batch).__name__}; it must return pairs (inputs, targets)")
        xs.append(np.asarray(batch[0]))
        ys.append(np.asarray(batch[1]))
    if not xs:
        raise DataError("the loader returned no batch; it needs at least one example")
    return Dataset.of(np.concatenate(xs), np.concatenate(ys))
