"""Loads data that arrives one example at a time, from a generator, a sensor or another library."""

from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from edgeasync.data.dataset import Dataset
from edgeasync.errors import DataError


def from_iterable(samples: Iterable[tuple[npt.ArrayLike, int]], count_max: int) -> Dataset:
    """Copy at most `count_max` examples into memory.

    Each item of `samples` is a pair: the features of an example, and its label.

    While they are copied, the examples are in memory twice. Raises `DataError` in the same cases as
    `Dataset.of`, and also if the examples differ in shape.

    >>> from edgeasync.data import from_iterable
    >>> readings = (([0.5 * number, 1.0], number % 2) for number in range(1000))
    >>> from_iterable(readings, count_max=100).x.shape
    (100, 2)
    """
    examples: list[npt.NDArray[np.float32]] = []
    labels: list[int] = []
    for number, (features, label) in enumerate(islice(samples, count_max)):
        try:
            # Copy, because a source may reuse one buffer.
            example = np.array(features, np.float32, ndmin=1)
        except (TypeError, ValueError) as error:
            raise DataError(f"sample {number}: its features are not an array of real numbers") from error
        if examples and example.shape != examples[0].shape:
            raise DataError(
                f"sample {number} has shape {example.shape}, but the first has shape {examples[0].shape}; use "
                "the same shape for every example"
            )
        examples.append(example)
        labels.append(label)
    if not examples:
        raise DataError("the iterable has no samples; it needs at least one")
    return Dataset.of(np.stack(examples), labels, where="the samples")
