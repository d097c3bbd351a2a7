"""Examples and their targets held in memory, and the endless stream of batches that training draws from them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.errors import ConfigError, DataError

Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]
"""Class numbers, int64, or values to predict, float32; one for each example, or an array of them, (n, ...)."""

Batch = tuple[npt.NDArray[np.float32], Targets]
"""Examples float32 (batch, features...) and targets (batch, ...)."""

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Examples `x`, float32 (n, features...), and targets `y`: labels int64 or values float32, (n, ...).

    Make one with `Dataset.of`.

    >>> import numpy as np
    >>> from edgeasync import Dataset
    >>> data = Dataset.of(np.eye(4), [0, 1, 0, 1])
    >>> len(data), data.x.dtype, data.y.dtype
    (4, dtype('float32'), dtype('int64'))
    """

    x: npt.NDArray[np.float32]
    y: Targets

    @classmethod
    def of(cls, x: npt.ArrayLike, y: npt.ArrayLike, *, where: str = "the data") -> "Dataset":
        """Make a dataset from examples and targets.

        Integer targets are labels. Arrays of the right type are not copied.

        Raises `DataError` if there is no example, if the numbers of examples and targets differ, if a value is
        not finite, or if a label is negative. The message begins with `where`.
        """
        examples, targets = _array(x, "x", where), _array(y, "y", where)
        if examples.dtype.kind not in "biuf":
            raise DataError(f"{where}: x holds {examples.dtype} values; give real numbers")
        if targets.dtype.kind not in "biuf":
            raise DataError(f"{where}: y holds {targets.dtype} values; give class numbers 0, 1, 2, ... or floats")
        if examples.ndim < 2:
            raise DataError(f"{where}: x has {examples.ndim} dimensions; give one row of features per example")
        if not targets.ndim:
            raise DataError(f"{where}: y is a single value; give one label per example")
        if len(examples) != len(targets):
            raise DataError(
                f"{where}: {len(examples)} examples but {len(targets)} labels; give one label for each"
            )
        if not examples.size:
            raise DataError(f"{where}: there are no values; give at least one example with at least one feature")
        values = _floats(examples, "x", where)
        if targets.dtype.kind == "f":
            return cls(values, values if targets is examples else _floats(targets, "y", where))
        if targets.min() < 0:
            raise DataError(
                f"{where}: label {targets.min()} is negative; number the classes from 0, or give values as floats"
            )
        if targets.max() > np.iinfo(np.int64).max:
            raise DataError(f"{where}: label {targets.max()} is too large; number the classes from 0")
        return cls(values, np.ascontiguousarray(targets, np.int64))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: npt.NDArray[np.int64]) -> "Dataset":
        """Return a copy of the examples at `indices`, in that order."""
        return Dataset(self.x[indices], self.y[indices])


class Batches:
    """The endless stream of batches that `batches` draws; `state` tells its place, `restore` returns to one."""

    def __init__(self, dataset: Dataset, starts: range, seed: int) -> None:
        self._dataset = dataset
        self._starts = starts
        self._bits = np.random.PCG64(seed)
        self._begin_epoch()

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        if self._next == len(self._starts):
            self._begin_epoch()
        start = self._starts[self._next]
        self._next += 1
        chosen = self._order[start : start + self._starts.step]
        return self._dataset.x[chosen], self._dataset.y[chosen]

    def state(self) -> npt.NDArray[np.uint64]:
        """Return the place in the stream: of the epoch's order what it was drawn from, and batches drawn since."""
        return np.array([*self._shape, self._next, *self._drawn_from], np.uint64)

    def restore(self, state: npt.NDArray[np.uint64]) -> None:
        """Continue from a place; raises `ValueError` for one in another stream."""
        values = [int(value) for value in state.ravel()]
        if len(values) != 10 or tuple(values[:3]) != self._shape or values[3] > len(self._starts):
            raise ValueError("a place in batches of another size, or of other data")
        state_word, increment = (values[low] | values[low + 1] << 64 for low in (4, 6))
        self._bits.state = {
            "bit_generator": "PCG64",
            "state": {"state": state_word, "inc": increment},
            "has_uint32": values[8],
            "uinteger": values[9],
        }
        self._begin_epoch()
        self._next = values[3]

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self._dataset), self._starts.stop, self._starts.step

    def _begin_epoch(self) -> None:
        bits: dict[str, Any] = dict(self._bits.state)
        words = [part for word in bits["state"].values() for part in (word & _WORD, word >> 64)]
        self._drawn_from = [*words, bits["has_uint32"], bits["uinteger"]]
        self._order = np.random.Generator(self._bits).permutation(len(self._dataset))
        self._next = 0


def batches(dataset: Dataset, batch_size: int, seed: int, *, full: bool = False) -> Batches:
    """Yield batches without end, each epoch in a new order. The same seed gives the same batches.

    A batch is never larger than the data. The last batch of an epoch may be short; with `full` it is left out.
    Raises `ConfigError` if `batch_size` is below 1, and `DataError` if `full` batches need more examples.

    >>> import numpy as np
    >>> from edgeasync.data import Dataset, batches
    >>> x, y = next(batches(Dataset.of(np.eye(4), [0, 1, 0, 1]), batch_size=3, seed=0))
    >>> x.shape, y.shape
    ((3, 4), (3,))
    """
    if full and batch_size > len(dataset):
        raise DataError(f"{len(dataset)} examples do not fill a batch of {batch_size}; give more data")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; give 1 or more")
    end = len(dataset) - len(dataset) % batch_size if full else len(dataset)
    return Batches(dataset, range(0, end, batch_size), seed)


def _floats(values: npt.NDArray[np.generic], name: str, where: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.ascontiguousarray(values, np.float32)
        # The extremes tell without a mask as long as the data: a NaN anywhere makes both NaN.
        finite = np.isfinite(floats.min()) and np.isfinite(floats.max())
    if not finite:
        raise DataError(f"{where}: {name} has values that are not finite in float32; remove or replace them")
    return floats


def _array(values: npt.ArrayLike, name: str, where: str) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(f"{where}: {name} is not one array; give every example the same shape") from error
    except (TypeError, RuntimeError) as error:  # another library's array, which says why
        raise DataError(f"{where}: {name} cannot be read as a numpy array: {error}") from error
