"""Batches and subsets of datasets; a dataset has a length and items (example, target)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.async_train.arrays import Array, as_array
from edgeasync.async_train.ignored import ignore
from edgeasync.data import Dataset
from edgeasync.data.lazy import Samples
from edgeasync.errors import ConfigError, DataError


class Subset:
    """The items of a dataset at some indices.

    >>> from edgeasync.async_train import data
    >>> len(data.Subset([([0.0], 0), ([1.0], 1)], [1]))
    1
    """

    def __init__(self, dataset: Samples | Dataset, indices: Sequence[int] | npt.NDArray[Any]) -> None:
        self.dataset = Dataset.of(*dataset) if isinstance(dataset, tuple) else dataset
        self.indices = np.asarray(indices, np.int64).ravel()
        count = len(self.dataset)
        if self.indices.size and not -count <= self.indices.min() <= self.indices.max() < count:
            raise DataError(f"indices are out of range: the dataset has {count} examples")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return item(self.dataset, int(self.indices[index]))

    @property
    def targets(self) -> Any:
        """The targets, if the dataset stores them separately."""
        return np.asarray(self.dataset.targets)[self.indices]  # type: ignore[union-attr]

    @property
    def lazy(self) -> bool:
        """Whether examples are read at each access."""
        return bool(getattr(self.dataset, "lazy", False))


class DataLoader:
    """The batches of a dataset; if `shuffle` is set, each pass has a new random order.

    - `dataset`: a dataset of this module, an `edgeasync.Dataset`, a pair of arrays, or any object
      with a length and items.
    - `seed`: the seed for shuffling. The order also depends on `epoch`, the number of passes that
      have begun. You may set `epoch`.
    - `num_workers` and `pin_memory` are ignored.

    >>> import numpy as np
    >>> from edgeasync.async_train import data
    >>> [x.shape for x, y in data.DataLoader((np.zeros((5, 3)), np.zeros(5, int)), batch_size=2)]
    [(2, 3), (2, 3), (1, 3)]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,  # noqa: FBT001, FBT002 - like torch
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; pass 1 or more")
        ignore("DataLoader", "examples are read in this process", num_workers=num_workers or None)
        ignore("DataLoader", "arrays stay in ordinary memory", pin_memory=pin_memory or None)
        self.dataset = Dataset.of(*dataset) if isinstance(dataset, tuple) else dataset
        self.batch_size = batch_size
        self.epoch = 0
        self._shuffle, self._drop_last, self._seed = shuffle, drop_last, seed

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        order = np.arange(len(self.dataset))
        if self._shuffle:
            order = np.random.default_rng((self._seed, self.epoch)).permutation(order)
        self.epoch += 1
        for number in range(len(self)):
            x, y = take(self.dataset, order[number * self.batch_size : (number + 1) * self.batch_size])
            yield as_array(x), as_array(y)


def item(dataset: Any, index: int) -> tuple[Any, Any]:
    """Return an example and its target."""
    if isinstance(dataset, Dataset):
        return dataset.x[index], dataset.y[index]
    example, target = dataset[index]
    return example, target


def take(dataset: Any, indices: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Return examples and targets at `indices` as arrays; raises `DataError` if shapes differ."""
    if isinstance(dataset, Dataset):
        return dataset.features[indices], dataset.y[indices]
    examples, targets = zip(*[item(dataset, int(index)) for index in indices], strict=True)
    return stack(examples), _targets(targets)


def stack(examples: Sequence[Any]) -> npt.NDArray[Any]:
    """Stack examples into one array, which is float32 unless the examples are integers."""
    try:
        found = np.stack([np.asarray(example) for example in examples])
    except ValueError:
        shapes = sorted({np.shape(example) for example in examples})
        raise DataError(
            f"examples have the shapes {shapes[0]} and {shapes[-1]}, but a batch needs equal shapes; for images "
            "use transforms.Resize and CenterCrop first"
        ) from None
    return found if found.dtype.kind in "iu" else found.astype(np.float32, copy=False)


def _targets(targets: Sequence[Any]) -> npt.NDArray[Any]:
    found = np.asarray([np.asarray(target) for target in targets])
    return found.astype(np.float32 if found.dtype.kind == "f" else np.int64, copy=False)
