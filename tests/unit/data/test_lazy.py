"""Examples that are read when they are drawn."""

import numpy as np
import pytest

from edgeasync.data import batches, from_samples
from edgeasync.errors import DataError


class Images:
    """Ten examples, and a count of how often each was read."""

    def __init__(self, shapes=((2, 2),)):
        self.read = np.zeros(10, int)
        self._shapes = shapes

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.read[index] += 1
        return np.full(self._shapes[index % len(self._shapes)], index, np.float64), index % 2


class Labelled(Images):
    targets = tuple(number % 2 for number in range(10))


def test_an_example_is_read_when_it_is_drawn():
    images = Labelled()
    data = from_samples(images)
    assert images.read.tolist() == [1] + [0] * 9, "the first says the shape"
    assert (data.x.shape, data.x.dtype, data.y.tolist()) == ((10, 2, 2), np.float32, [0, 1] * 5)
    assert data.features[np.array([3, 3])].tolist() == [[[3.0, 3.0]] * 2] * 2
    assert data.take(np.array([7])).x.tolist() == [[[7.0, 7.0]] * 2]
    assert images.read.tolist() == [1, 0, 0, 2, 0, 0, 0, 1, 0, 0]
    np.testing.assert_array_equal(np.asarray(data.x)[:, 0, 0], np.arange(10))


def test_without_targets_each_is_read_once_for_its_target():
    images = Images()
    assert from_samples(images).y.tolist() == [0, 1] * 5
    assert images.read.tolist() == [2] + [1] * 9


def test_targets_that_are_transformed_are_those_that_the_examples_come_with():
    class Transformed(Labelled):
        targets = tuple(range(10))

        @staticmethod
        def target_transform(target):
            return target % 2

    assert from_samples(Transformed()).y.tolist() == [0, 1] * 5


def test_an_example_may_be_a_single_value():
    data = from_samples([(0.5, 0), (1.5, 1)])
    assert data.x.shape == (2, 1)
    assert data.features[:].tolist() == [[0.5], [1.5]]


def test_each_pass_reads_again():
    images = Labelled()
    drawn = batches(from_samples(images), batch_size=5, seed=0)
    for _ in range(6):
        next(drawn)
    assert images.read.tolist() == [4] + [3] * 9


def test_what_is_wrong_is_told():
    with pytest.raises(DataError, match="no examples"):
        from_samples([])
    with pytest.raises(DataError, match=r"example 1 has shape \(3,\), but the first has shape \(2,\)"):
        from_samples(Images(shapes=((2,), (3,)))).features[:]
