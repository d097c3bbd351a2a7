import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeasync.data.dataset import Dataset
from edgeasync.data.partition import dirichlet, iid
from edgeasync.errors import ConfigError, DataError


def numbered(count, classes=3):
    """Examples whose only feature is their number."""
    numbers = np.arange(count)
    return Dataset.of(numbers[:, None], numbers % classes)


def numbers_of(parts):
    return [part.x[:, 0].astype(int).tolist() for part in parts]


def covers_once(parts, dataset):
    pairs = [(x, y) for part in parts for x, y in zip(part.x[:, 0], part.y, strict=True)]
    return sorted(pairs) == sorted(zip(dataset.x[:, 0], dataset.y, strict=True))


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 2**64))
def test_iid_gives_every_example_once(count, parts, seed):
    dataset = numbered(max(count, parts))
    result = iid(dataset, parts, seed)
    sizes = [len(part) for part in result]
    assert len(result) == parts
    assert max(sizes) - min(sizes) <= 1
    assert covers_once(result, dataset)
    assert numbers_of(iid(dataset, parts, seed)) == numbers_of(result)


@given(
    count=st.integers(1, 60),
    parts=st.integers(1, 12),
    alpha=st.sampled_from([1e-6, 0.01, 0.3, 1.0, 1e6]),
    seed=st.integers(0, 2**64),
    examples_min=st.integers(0, 5),
    classes=st.integers(1, 5),
)
def test_dirichlet_gives_every_example_once_and_enough_to_each(
    *, count, parts, alpha, seed, examples_min, classes
):
    dataset = numbered(max(count, parts * examples_min), classes)
    result = dirichlet(dataset, parts, alpha, seed, examples_min=examples_min)
    assert len(result) == parts
    assert min(len(part) for part in result) >= examples_min
    assert covers_once(result, dataset)
    again = dirichlet(dataset, parts, alpha, seed, examples_min=examples_min)
    assert numbers_of(again) == numbers_of(result)


def test_alpha_sets_the_skew():
    dataset = numbered(5000, classes=10)

    def mean_largest_share(alpha):
        parts = dirichlet(dataset, 10, alpha, seed=1)
        return np.mean([np.bincount(part.y, minlength=10).max() / len(part) for part in parts])

    assert mean_largest_share(0.05) > 0.5
    assert mean_largest_share(1000.0) < 0.15


@pytest.mark.parametrize(
    ("part", "error", "sentence"),
    [
        (lambda data: iid(data, 0, 0), ConfigError, "parts is 0; pass 1 or more"),
        (lambda data: iid(data, 7, 0), DataError, "6 examples are too few for 7 parts of at least 1"),
        (lambda data: dirichlet(data, 3, 0.0, 0), ConfigError, "alpha is 0.0; pass a finite number above 0"),
        (lambda data: dirichlet(data, 3, np.nan, 0), ConfigError, "alpha is nan"),
        (lambda data: dirichlet(data, 3, 1.0, 0, examples_min=-1), ConfigError, "examples_min is -1"),
        (
            lambda data: dirichlet(data, 3, 1.0, 0, examples_min=3),
            DataError,
            "are too few for 3 parts of at least 3",
        ),
    ],
)
def test_what_cannot_be_parted_is_refused(part, error, sentence):
    with pytest.raises(error, match=sentence):
        part(numbered(6))
