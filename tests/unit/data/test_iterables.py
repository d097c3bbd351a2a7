"""Datasets from iterables."""

from itertools import count

import numpy as np
import pytest

from edgeasync.data.iterables import from_iterable
from edgeasync.errors import DataError


def test_an_iterable_is_read_no_further_than_asked():
    buffer = np.zeros(2)
    numbers = count()

    def samples():
        for number in numbers:
            buffer[:] = number
            yield buffer, number % 3

    dataset = from_iterable(samples(), 4)
    assert dataset.x.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert dataset.y.tolist() == [0, 1, 2, 0]
    assert next(numbers) == 4
    assert from_iterable([(1.5, 0)], 4).x.shape == (1, 1)


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        ([], "the iterable has no samples"),
        ([([1.0], 0), ([1.0, 2.0], 0)], r"sample 1 has shape \(2,\), but the first has shape \(1,\)"),
        ([([1.0], 0), (["a"], 0)], "sample 1: its features are not an array of real numbers"),
        ([([1.0], "cat")], "y has type <U3"),
        ([([np.inf], 0)], "not finite"),
    ],
)
def test_an_iterable_says_what_is_wrong(samples, sentence):
    with pytest.raises(DataError, match=sentence):
        from_iterable(samples, 10)
