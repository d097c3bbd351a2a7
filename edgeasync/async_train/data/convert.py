"""What programs give as data, as edgeasync trains on it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from edgeasync.async_train.data.loader import DataLoader, take
from edgeasync.data import Dataset, from_samples, load
from edgeasync.errors import DataError


def as_dataset(data: Any) -> Dataset:
    """Return data as an `edgeasync.Dataset`.

    - A `DataLoader` of ours gives its dataset, without its order.
    - A dataset whose examples lie in files, such as `ImageFolder`, is read as it is trained on, again each time.
    - Another dataset is read once, with its transforms. Of another loader, such as torch's, all batches of a pass
      are read.
    - An `edgeasync.Dataset`, a pair of arrays and the path of a file are as for `edgeasync.train`.

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
    raise DataError(f"data is {type(data).__name__}; give a dataset, a loader, or a tuple (x, y) of arrays")


def batch_size_of(data: object) -> int | None:
    """Return the batch size of a loader, `None` of anything else."""
    found = getattr(data, "batch_size", None)
    return found if isinstance(found, int) and found >= 1 else None


def _read(batches: Iterable[Any]) -> Dataset:
    """Read one pass of a loader; raises `DataError` unless it gives pairs."""
    xs, ys = [], []
    for batch in batches:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise DataError(f"the loader gives {type(batch).__name__}; it must give pairs (inputs, targets)")
        xs.append(np.asarray(batch[0]))
        ys.append(np.asarray(batch[1]))
    if not xs:
        raise DataError("the loader gave no batch; give at least one example")
    return Dataset.of(np.concatenate(xs), np.concatenate(ys))
