import io
import zipfile
from itertools import count, islice

import numpy as np
import pytest

from edgeasync.data.dataset import Dataset, batches, fits
from edgeasync.data.files import load
from edgeasync.data.iterables import from_iterable
from edgeasync.errors import ConfigError, DataError

GOOD_X = np.arange(12, dtype=np.float32).reshape(6, 2)
GOOD_Y = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (GOOD_X, GOOD_Y[:5], "6 examples but 5 labels; give one label for each"),
        (GOOD_X[:0], GOOD_Y[:0], "there are no values; give at least one example"),
        (GOOD_X[:, :0], GOOD_Y, "there are no values; give at least one example"),
        (GOOD_X[:, 0], GOOD_Y, "x has 1 dimensions; give one row of features per example"),
        (GOOD_X, 3, "y is a single value; give one label per example"),
        (np.full((6, 2), np.nan), GOOD_Y, "values that are not finite"),
        (np.where(GOOD_X == 3, -np.inf, GOOD_X), GOOD_Y, "values that are not finite"),
        (np.full((6, 2), 1e300), GOOD_Y, "values that are not finite in float32"),
        (GOOD_X.astype(str), GOOD_Y, "x holds <U32 values; give real numbers"),
        (GOOD_X.astype(complex), GOOD_Y, "x holds complex128 values; give real numbers"),
        ([[1.0], [1.0, 2.0]], [0, 1], "x is not one array; give every example the same shape"),
        (GOOD_X, GOOD_Y.astype(complex), "y holds complex128 values; give class numbers"),
        (GOOD_X, GOOD_Y * np.nan, "y has values that are not finite"),
        (GOOD_X, np.zeros((6, 0)), "y of shape (6, 0) has no values; give one label for each example"),
        (GOOD_X, np.zeros((6, 0), int), "y of shape (6, 0) has no values; give one label for each example"),
        (GOOD_X, GOOD_Y - 1, "label -1 is negative; number the classes from 0"),
        (GOOD_X, np.full(6, 2**63, np.uint64), "label 9223372036854775808 is too large"),
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
    with pytest.raises(DataError, match="no examples to draw batches from; give at least one"):
        batches(empty, 4, seed=0)


def test_a_batch_has_an_example_at_least():
    with pytest.raises(ConfigError, match="batch_size is 0; give 1 or more"):
        batches(Dataset.of(GOOD_X, GOOD_Y), 0, seed=0)


def test_npz_and_csv_give_back_what_was_saved(tmp_path):
    np.savez_compressed(tmp_path / "d.npz", x=GOOD_X.astype(np.float64), y=GOOD_Y.astype(np.int8))
    lines = [f"{a},{label},{b}" for (a, b), label in zip(GOOD_X, GOOD_Y, strict=True)]
    (tmp_path / "middle.csv").write_text("\ufeffa, y ,b\n" + "\n\n".join(lines) + "\n", encoding="utf-8")
    lines = [f'"{a}",{b},{label}.0' for (a, b), label in zip(GOOD_X, GOOD_Y, strict=True)]
    (tmp_path / "last.CSV").write_text("a,b,kind\r\n" + "\r\n".join(lines), encoding="utf-8")
    for name in ("d.npz", "middle.csv", "last.CSV"):
        dataset = load(tmp_path / name)
        assert (dataset.x.dtype, dataset.y.dtype) == (np.float32, np.int64)
        assert np.array_equal(dataset.x, GOOD_X)
        assert np.array_equal(dataset.y, GOOD_Y)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the first row names 0 columns"),
        ("y\n1\n", "the first row names 1 columns"),
        ("1,2\n3,4\n", "the first row holds numbers; put a row with the columns' names above it"),
        ("a,y\n", "there are no examples under the header"),
        ("a,b,y\n1,2,0\n1,oops,0\n", "line 3, column 'b': 'oops' is not a finite number"),
        ("y,a,b\n0,1,2\n0,1,nan\n", "line 3, column 'b': 'nan' is not a finite number"),
        ("y,a,b\n0,,2\n", "line 2, column 'a': '' is not a finite number"),
        ("a,y\n1e300,0\n", "values that are not finite in float32"),
        ("a,y\n1,cat\n", "line 2, column 'y': 'cat' is not a finite number"),
        ("a,y\n1,1e300\n", "y has values that are not finite in float32"),
        ("a,b,y\n1,2\n", "line 2: 2 columns, the header has 3"),
    ],
)
def test_a_csv_says_where_it_is_wrong(tmp_path, text, sentence):
    path = tmp_path / "d.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert sentence in str(caught.value)


def npz_of(**arrays):
    def write(path):
        np.savez(path, **arrays)

    return write


def single_array(path):
    with path.open("wb") as file:
        np.save(file, GOOD_X)


def damaged(path):
    np.savez_compressed(path, x=GOOD_X, y=GOOD_Y)
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)


def endless(path):
    """Write an archive whose array says that it has a quintillion bytes."""
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<f4", "fortran_order": False, "shape": (2**58,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", array.getvalue() + bytes(64))


@pytest.mark.parametrize(
    ("name", "write", "sentence"),
    [
        ("d.npz", lambda _: None, "no such file; give the path of a .npz or .csv file"),
        ("d.csv", lambda _: None, "no such file"),
        ("d.npz", lambda path: path.mkdir(), "cannot be read: Is a directory"),
        ("d.npz", lambda path: path.write_bytes(b""), "not a readable npz file"),
        ("d.npz", lambda path: path.write_bytes(b"hello"), "not a readable npz file"),
        ("d.npz", lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99)), "not a readable npz file"),
        ("d.npz", damaged, "not a readable npz file"),
        ("d.npz", endless, "its arrays need more memory than there is"),
        ("d.npz", single_array, "holds a single array; save x and y with numpy.savez"),
        ("d.npz", npz_of(), "array 'x' is missing, there is nothing"),
        ("d.npz", npz_of(x=GOOD_X, labels=GOOD_Y), "array 'y' is missing, there is x, labels"),
        ("d.npz", npz_of(x=GOOD_X, y=np.array([None] * 6)), "not a readable npz file of plain arrays"),
        ("d.npz", npz_of(x=GOOD_X[0], y=GOOD_Y), "x has 1 dimensions"),
        ("d.npz", npz_of(x=GOOD_X, y=np.zeros((6, 0))), "y of shape (6, 0) has no values"),
        ("d.csv", lambda path: path.write_bytes(b"a,y\n\xff\xfe,1\n"), "not a CSV file in UTF-8"),
        ("d.parquet", lambda path: path.write_bytes(b""), "cannot read .parquet; give .npz or .csv"),
        ("d", lambda path: path.write_bytes(b""), "cannot read a file without suffix"),
    ],
)
def test_load_says_what_is_wrong_with_a_file(tmp_path, name, write, sentence):
    path = tmp_path / name
    write(path)
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_damage_to_an_npz_raises_anything_but_a_data_error(tmp_path):
    path = tmp_path / "d.npz"
    np.savez_compressed(path, x=GOOD_X, y=GOOD_Y)
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content), 3):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            load(path)
        except DataError:
            refused += 1
    assert refused > 50


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
        ([], "the iterable gave no samples"),
        ([([1.0], 0), ([1.0, 2.0], 0)], r"sample 1: shape \(2,\), the first has \(1,\)"),
        ([([1.0], 0), (["a"], 0)], "sample 1: its features are not an array of real numbers"),
        ([([1.0], "cat")], "y holds <U3 values"),
        ([([np.inf], 0)], "not finite"),
    ],
)
def test_an_iterable_says_what_is_wrong(samples, sentence):
    with pytest.raises(DataError, match=sentence):
        from_iterable(samples, 10)


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
        with pytest.raises(ValueError, match="another size"):
            other.restore(place)
        assert len(first)
