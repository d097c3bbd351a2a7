"""Datasets and batches, and errors for invalid ones."""

from itertools import islice

import numpy as np
import pytest

from edgeasync.data.dataset import Dataset, batches, fits
from edgeasync.data.files import load
from edgeasync.errors import ConfigError, DataError

GOOD_X = np.arange(12, dtype=np.float32).reshape(6, 2)
GOOD_Y = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (GOOD_X, GOOD_Y[:5], "6 examples but 5 labels; pass one label per example"),
        (GOOD_X[:0], GOOD_Y[:0], "no values; pass at least one example with at least one feature"),
        (GOOD_X[:, :0], GOOD_Y, "no values; pass at least one example with at least one feature"),
        (GOOD_X[:, 0], GOOD_Y, "x has 1 dimensions; pass one row of features per example"),
        (GOOD_X, 3, "y is a single value; pass one label per example"),
        (np.full((6, 2), np.nan), GOOD_Y, "values that are not finite"),
        (np.where(GOOD_X == 3, -np.inf, GOOD_X), GOOD_Y, "values that are not finite"),
        (np.full((6, 2), 1e300), GOOD_Y, "values that are not finite in float32"),
        (GOOD_X.astype(str), GOOD_Y, "x has type <U32; use real numbers"),
        ([[1.0], [1.0, 2.0]], [0, 1], "x cannot become one array; use the same shape for every example"),
        (GOOD_X, GOOD_Y.astype(complex), "y has type complex128; use class numbers"),
        (GOOD_X, GOOD_Y * np.nan, "y has values that are not finite"),
        (GOOD_X, np.zeros((6, 0)), "y of shape (6, 0) has no values; pass one label per example"),
        (GOOD_X, GOOD_Y - 1, "label -1 is negative; number the classes from 0"),
        (GOOD_X, np.full(6, 2**63, np.uint64), "label 9223372036854775808 is out of range for int64"),
    ],
)
def test_a_dataset_says_what_is_wrong(x, y, sentence):
    with pytest.raises(DataError) as caught:
        Dataset.of(x, y, where="readings")
    assert str(caught.value).startswith("readings: ")
    assert sentence in str(caught.value)


def test_targets_that_are_floats_are_values_to_predict(tmp_path):
    dataset = Dataset.of(GOOD_X, GOOD_X / 2)
    assert (dataset.y.dtype, dataset.y.shape) == (np.float32, (6, 2))
    (tmp_path / "d.csv").write_text("a,y\n1,0\n1,-0.5\n")
    assert load(tmp_path / "d.csv").y.tolist() == [0.0, -0.5]
    np.savez(tmp_path / "d.npz", x=GOOD_X)
    own = load(tmp_path / "d.npz")
    assert own.y is own.x


def test_an_example_may_have_several_labels():
    assert Dataset.of(GOOD_X, np.ones((6, 4), np.uint8)).y.shape == (6, 4)


@pytest.mark.parametrize(
    ("have", "want", "right"),
    [
        ((), (1,), True),
        ((28, 28), (1, 28, 28), True),
        ((784,), (1, 28, 28), True),
        ((3, 8, 8), (192,), True),
        ((24, 8), (3, 8, 8), True),
        ((8, 8, 3), (3, 8, 8), False),
        ((8, 3, 1), (3, 8), False),
        ((2, 12), (3, 8), False),
        ((9,), (8,), False),
        ((), (3,), False),
    ],
)
def test_one_shape_fits_another_if_neighbouring_axes_are_joined(have, want, right):
    assert fits(have, want) is fits(want, have) is right


def test_full_batches_leave_out_the_rest_of_an_epoch():
    stream = batches(Dataset.of(GOOD_X, GOOD_Y), 4, seed=0, full=True)
    assert [len(y) for _, y in islice(stream, 5)] == [4] * 5
    with pytest.raises(DataError, match="6 examples do not fill a batch of 7"):
        batches(Dataset.of(GOOD_X, GOOD_Y), 7, seed=0, full=True)


def test_a_dataset_converts_only_what_it_must():
    dataset = Dataset.of(GOOD_X, GOOD_Y)
    assert dataset.x is GOOD_X
    assert dataset.y is GOOD_Y
    converted = Dataset.of(GOOD_X.astype(np.uint8), GOOD_Y.astype(np.uint8))
    assert (converted.x.dtype, converted.y.dtype) == (np.float32, np.int64)
    taken = converted.take(np.array([5, 0]))
    assert len(taken) == 2
    assert taken.x.tolist() == [[10, 11], [0, 1]]
    assert taken.y.tolist() == [2, 0]


@pytest.mark.parametrize(("batch_size", "sizes"), [(4, [4, 2]), (6, [6]), (100, [6]), (1, [1] * 6)])
def test_an_epoch_of_batches_holds_every_example_once(batch_size, sizes):
    dataset = Dataset.of(GOOD_X, np.arange(6))
    stream = batches(dataset, batch_size, seed=3)
    orders = []
    for _ in range(3):
        epoch = list(islice(stream, len(sizes)))
        assert [len(y) for _, y in epoch] == sizes
        orders.append(tuple(int(label) for _, y in epoch for label in y))
        assert sorted(orders[-1]) == list(range(6))
        for x, y in epoch:
            assert np.array_equal(x, GOOD_X[y])
    assert len(set(orders)) == 3
    again = islice(batches(dataset, batch_size, seed=3), len(sizes))
    assert tuple(int(label) for _, y in again for label in y) == orders[0]


def test_batches_of_no_examples_are_refused():
    empty = Dataset.of(GOOD_X, GOOD_Y).take(np.array([], np.int64))
    with pytest.raises(DataError, match="no examples to draw batches from; pass at least one"):
        batches(empty, 4, seed=0)


def test_a_batch_has_an_example_at_least():
    with pytest.raises(ConfigError, match="batch_size is 0; set 1 or more"):
        batches(Dataset.of(GOOD_X, GOOD_Y), 0, seed=0)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("drawn", [0, 1, 2, 7, 20])
def test_batches_go_on_from_a_place(drawn, full):
    dataset = Dataset.of(GOOD_X, GOOD_Y)
    stream = batches(dataset, 4, seed=3, full=full)
    for _ in range(drawn):
        next(stream)
    state = stream.state()
    again = batches(dataset, 4, seed=8, full=full)
    again.restore(state)
    assert np.array_equal(again.state(), state)
    for (x, y), (x_again, y_again) in islice(zip(stream, again, strict=True), 9):
        assert np.array_equal(x, x_again)
        assert np.array_equal(y, y_again)


def test_a_place_in_other_batches_is_refused():
    state = batches(Dataset.of(GOOD_X, GOOD_Y), 4, seed=3).state()
    wrong = state.copy()
    wrong[3] = 3
    for other, place in [
        (batches(Dataset.of(GOOD_X[:5], GOOD_Y[:5]), 4, seed=3), state),
        (batches(Dataset.of(GOOD_X, GOOD_Y), 3, seed=3), state),
        (batches(Dataset.of(GOOD_X, GOOD_Y), 4, seed=3, full=True), state),
        (batches(Dataset.of(GOOD_X, GOOD_Y), 4, seed=3), state[:-1]),
        (batches(Dataset.of(GOOD_X, GOOD_Y), 4, seed=3), wrong),
    ]:
        first = next(other)[1]
        with pytest.raises(ValueError, match="batches of another size, or to other data"):
            other.restore(place)
        assert len(first)
