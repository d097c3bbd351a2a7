"""Examples and targets in memory, and the endless stream of batches drawn from them."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

Targets = npt.NDArray[np.int64] | npt.NDArray[np.float32]
"""Targets (n, ...): int64 labels (class numbers) or float32 values. An example may have several
targets.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Examples for a model with several inputs.

    `arrays` maps the name of each input to an array (n, features...).
    """

    arrays: dict[str, npt.NDArray[np.float32]]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, rows: slice | npt.NDArray[np.int64]) -> "Inputs":
        return Inputs({name: array[rows] for name, array in self.arrays.items()})


Features = npt.NDArray[np.float32] | Inputs
"""Examples: a float32 array (n, features...), or several such arrays by input name."""

Batch = tuple[Any, Targets]
"""The examples of a batch, as `Features`, and their targets (batch, ...)."""

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A dataset of examples and their targets in memory.

    The examples `x` are float32 (n, features...). The targets `y` are int64 or float32 (n, ...).

    For a model with several inputs, `features` contains one array per input, by name. Create
    datasets with `Dataset.of`.

    >>> import numpy as np
    >>> from edgeasync import Dataset
    >>> data = Dataset.of(np.eye(4), [0, 1, 0, 1])
    >>> len(data), data.x.dtype, data.y.dtype
    (4, dtype('float32'), dtype('int64'))
    >>> len(Dataset.of({"image": np.zeros((2, 8, 8)), "age": np.zeros((2, 1))}, [0, 1]))
    2
    """

    features: Features
    y: Targets

    @property
    def x(self) -> npt.NDArray[np.float32]:
        """The examples, if the data has a single input.

        Raises `DataError` if there are several inputs.
        """
        if isinstance(self.features, Inputs):
            raise DataError(
                f"the data has the inputs {', '.join(self.features.arrays)}, but a single array x is expected; "
                "use data with one input"
            )
        return self.features

    @classmethod
    def of(
        cls, x: npt.ArrayLike | Mapping[str, npt.ArrayLike], y: npt.ArrayLike, *, where: str = "the data"
    ) -> "Dataset":
        """Create a dataset from examples and targets.

        For a model with several inputs, `x` is a dict that maps each input's name to an array.
        Integer targets are labels. Arrays that already have the right dtype are not copied.

        Raises `DataError` if there are no examples, if the numbers of examples and targets differ,
        if a value is not finite, or if a label is negative. The error message starts with `where`.
        """
        targets = _array(y, "y", where)
        if targets.dtype.kind not in "biuf":
            raise DataError(f"{where}: y has type {targets.dtype}; use class numbers 0, 1, 2, ... or floats")
        if not targets.ndim:
            raise DataError(f"{where}: y is a single value; pass one label per example")
        values: Features
        if isinstance(x, Mapping):
            if not x:
                raise DataError(f"{where}: x is empty; pass an array for each input of the model, by its name")
            values = Inputs(
                {
                    str(name): _examples(_array(array, f"x[{name!r}]", where), len(targets), f"x[{name!r}]", where)
                    for name, array in x.items()
                }
            )
        else:
            given = _array(x, "x", where)
            values = _examples(given, len(targets), "x", where)
            if targets is given and targets.dtype.kind == "f":
                return cls(values, values)
        if not targets.size:
            raise DataError(f"{where}: y of shape {targets.shape} has no values; pass one label per example")
        if targets.dtype.kind == "f":
            return cls(values, _floats(targets, "y", where))
        if targets.min() < 0:
            raise DataError(
                f"{where}: label {targets.min()} is negative; number the classes from 0, or pass values as floats"
            )
        if targets.max() > np.iinfo(np.int64).max:
            raise DataError(f"{where}: label {targets.max()} is out of range for int64; number the classes from 0")
        return cls(values, np.ascontiguousarray(targets, np.int64))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: npt.NDArray[np.int64]) -> "Dataset":
        """Return a copy of the examples at `indices`, in that order."""
        return Dataset(self.features[indices], self.y[indices])


def check_names(x: Features, names: Sequence[str]) -> None:
    """Raise `DataError` unless the examples have exactly these inputs.

    A plain array, which has no name, matches any single input.
    """
    have = list(x.arrays) if isinstance(x, Inputs) else list(names[:1])
    if sorted(have) != sorted(names):
        found = f"the inputs {', '.join(have)}" if isinstance(x, Inputs) else "one array x"
        raise DataError(
            f"the data has {found}, but the hub's model expects {', '.join(names)}; pass an array for each"
        )


def input_of(x: Features, name: str) -> npt.NDArray[np.float32]:
    """Return the examples for the input `name`."""
    return x.arrays[name] if isinstance(x, Inputs) else x


def check_shape(have: tuple[int, ...], want: tuple[int, ...], what: str) -> None:
    """Raise `DataError` unless `have` can be reshaped to `want` without permuting axes."""
    if not fits(have, want):
        act = "use data of that shape" if math.prod(have) != math.prod(want) else "transpose or reshape them"
        raise DataError(f"the data has {what} of shape {have}, but the hub's model expects {want}; {act}")


def fits(have: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal after merging adjacent axes of one of them.

    So flattened images match a model that expects 2D images, and vice versa. Shapes whose axes are
    in a different order do not match.

    >>> from edgeasync.data.dataset import fits
    >>> fits((64,), (1, 8, 8)), fits((3, 8, 8), (192,)), fits((8, 8, 3), (3, 8, 8))
    (True, True, False)
    """
    ends, wanted = [set(accumulate(shape, mul)) - {1} for shape in (have, want)]
    return math.prod(have) == math.prod(want) and (ends <= wanted or wanted <= ends)


def check_answers(targets: npt.NDArray[Any]) -> None:
    """Raise `DataError` unless all targets are from 0 to 1. Lazily read targets are not checked."""
    if isinstance(targets, np.ndarray) and targets.size and (targets.min() < 0.0 or targets.max() > 1.0):
        raise DataError(
            f"the data's targets range from {targets.min():g} to {targets.max():g}, but the loss bce_with_logits "
            "expects targets from 0 (no) to 1 (yes); convert the targets to that range, or use another loss"
        )


def warn_of_one_class(targets: npt.NDArray[Any]) -> None:
    """Log a warning if all targets are equal. Lazily read targets are not checked."""
    if isinstance(targets, np.ndarray) and len(targets) > 1 and (targets == targets.flat[0]).all():
        _log.warning(
            "all %d targets of this device's data are %g, so it trains a single class; check y, unless other "
            "devices have other targets", len(targets), targets.flat[0],
        )  # fmt: skip


class Batches:
    """The endless iterator that `batches` returns.

    `state` returns the current position in the stream, and `restore` resumes from a saved position.
    """

    def __init__(self, dataset: Dataset, starts: range, seed: int) -> None:
        self._dataset = dataset
        self._starts = starts
        self._bits = np.random.PCG64(seed)
        self._begin_epoch()

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        return self.take(self.draw())

    @property
    def batch_size(self) -> int:
        """Examples per batch; the last batch of an epoch may be smaller."""
        return min(self._starts.step, len(self._dataset))

    @property
    def per_epoch(self) -> int:
        """Number of batches per epoch."""
        return len(self._starts)

    def draw(self) -> npt.NDArray[np.int64]:
        """Draw the next batch, and return the indices of its examples."""
        if self._next == len(self._starts):
            self._begin_epoch()
        start = self._starts[self._next]
        self._next += 1
        return self._order[start : start + self._starts.step]

    def take(self, chosen: npt.NDArray[np.int64]) -> Batch:
        """Return the examples and targets at the indices `chosen`."""
        return self._dataset.features[chosen], self._dataset.y[chosen]

    def state(self) -> npt.NDArray[np.uint64]:
        """Return the current position in the stream.

        It consists of the random generator's state at the start of the epoch, and the number of
        batches drawn since then.
        """
        return np.array([*self._shape, self._next, *self._drawn_from], np.uint64)

    def restore(self, state: npt.NDArray[np.uint64]) -> None:
        """Continue from a position that `state` returned.

        Raises `ValueError` if the position belongs to another stream.
        """
        values = [int(value) for value in state.ravel()]
        if len(values) != 10 or tuple(values[:3]) != self._shape or values[3] > len(self._starts):
            raise ValueError("the position belongs to batches of another size, or to other data")
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
    """Return an endless iterator of batches.

    The examples are shuffled again in each epoch. The same seed yields the same batches.

    A batch is never larger than the dataset. The last batch of an epoch may be smaller than the
    others. If `full` is true, such a batch is dropped. Raises `ConfigError` if `batch_size` is
    below 1, and `DataError` if there are no examples, or too few for one full batch if `full` is
    true.

    >>> import numpy as np
    >>> from edgeasync.data import Dataset, batches
    >>> x, y = next(batches(Dataset.of(np.eye(4), [0, 1, 0, 1]), batch_size=3, seed=0))
    >>> x.shape, y.shape
    ((3, 4), (3,))
    """
    if not len(dataset):
        raise DataError("there are no examples to draw batches from; pass at least one")
    if full and batch_size > len(dataset):
        raise DataError(f"{len(dataset)} examples do not fill a batch of {batch_size}; pass more data")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; set 1 or more")
    end = len(dataset) - len(dataset) % batch_size if full else len(dataset)
    return Batches(dataset, range(0, end, batch_size), seed)


def _examples(values: npt.NDArray[np.generic], count: int, name: str, where: str) -> npt.NDArray[np.float32]:
    """Return the examples of one input. Raises `DataError` unless there are `count` examples."""
    if values.dtype.kind not in "biuf":
        raise DataError(f"{where}: {name} has type {values.dtype}; use real numbers")
    if values.ndim < 2:
        raise DataError(f"{where}: {name} has {values.ndim} dimensions; pass one row of features per example")
    if len(values) != count:
        among = "" if name == "x" else f" in {name}"
        raise DataError(f"{where}: {len(values)} examples{among} but {count} labels; pass one label per example")
    if not values.size:
        raise DataError(f"{where}: no values; pass at least one example with at least one feature")
    return _floats(values, name, where)


def _floats(values: npt.NDArray[np.generic], name: str, where: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.ascontiguousarray(values, np.float32)
        # Checking the minimum and the maximum suffices, because a NaN makes both NaN. This needs no
        # mask.
        finite = np.isfinite(floats.min()) and np.isfinite(floats.max())
    if not finite:
        raise DataError(f"{where}: {name} has values that are not finite in float32; remove or replace them")
    return floats


def _array(values: npt.ArrayLike, name: str, where: str) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(
            f"{where}: {name} cannot become one array; use the same shape for every example"
        ) from error
    except (TypeError, RuntimeError) as error:  # another library's array, whose error message has the reason
        raise DataError(f"{where}: {name} cannot be read as a numpy array: {error}") from error
