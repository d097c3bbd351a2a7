"""Reading and writing data files, and errors for damaged ones."""

import io
import zipfile

import numpy as np
import pytest

from edgeasync.data.files import load
from edgeasync.errors import DataError

GOOD_X = np.arange(12, dtype=np.float32).reshape(6, 2)
GOOD_Y = np.array([0, 1, 2, 0, 1, 2])


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
        ("d.npz", lambda _: None, "no such file; pass the path of a .npz or .csv file"),
        ("d.csv", lambda _: None, "no such file"),
        ("d.npz", lambda path: path.mkdir(), "cannot be read: Is a directory"),
        ("d.npz", lambda path: path.write_bytes(b""), "not a readable npz file"),
        ("d.npz", lambda path: path.write_bytes(b"hello"), "not a readable npz file"),
        ("d.npz", lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99)), "not a readable npz file"),
        ("d.npz", damaged, "not a readable npz file"),
        ("d.npz", endless, "not enough memory for its arrays"),
        ("d.npz", single_array, "contains a single array; save x and y with numpy.savez"),
        ("d.npz", npz_of(), "array 'x' is missing, found nothing; save it as 'x'"),
        ("d.npz", npz_of(x=GOOD_X, labels=GOOD_Y), "array 'y' is missing, found x, labels; save it as 'y'"),
        ("d.npz", npz_of(x=GOOD_X, y=np.array([None] * 6)), "not a readable npz file of plain arrays"),
        ("d.npz", npz_of(x=GOOD_X[0], y=GOOD_Y), "x has 1 dimensions"),
        ("d.npz", npz_of(x=GOOD_X, y=np.zeros((6, 0))), "y of shape (6, 0) has no values"),
        ("d.csv", "", "the header has 0 columns; it needs features and a label"),
        ("d.csv", "y\n1\n", "the header has 1 columns"),
        ("d.csv", "1,2\n3,4\n", "the first row contains numbers; insert a header row with column names above it"),
        ("d.csv", "a,y\n", "no examples below the header"),
        ("d.csv", "a,b,y\n1,2,0\n1,oops,0\n", "line 3, column 'b': 'oops' is not a finite number"),
        ("d.csv", "y,a,b\n0,1,2\n0,1,nan\n", "line 3, column 'b': 'nan' is not a finite number"),
        ("d.csv", "y,a,b\n0,,2\n", "line 2, column 'a': '' is not a finite number"),
        ("d.csv", "a,y\n1e300,0\n", "values that are not finite in float32"),
        ("d.csv", "a,y\n1,cat\n", "line 2, column 'y': 'cat' is not a finite number"),
        ("d.csv", "a,y\n1,1e300\n", "y has values that are not finite in float32"),
        ("d.csv", "a,b,y\n1,2\n", "line 2: 2 columns, but the header has 3"),
        ("d.csv", lambda path: path.write_bytes(b"a,y\n\xff\xfe,1\n"), "not a CSV file in UTF-8"),
        ("d.parquet", lambda path: path.write_bytes(b""), "cannot read .parquet; use .npz or .csv"),
        ("d", lambda path: path.write_bytes(b""), "cannot read a file without suffix"),
    ],
)
def test_load_says_what_is_wrong_with_a_file(tmp_path, name, write, sentence):
    path = tmp_path / name
    if callable(write):
        write(path)
    else:
        path.write_text(write, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
