"""Reading MNIST files, and errors for damaged ones."""

import gzip
import struct

import numpy as np
import pytest

from edgeasync.async_train import data
from edgeasync.async_train.data import mnist
from edgeasync.errors import DataError
from examples.async_train.digits_idx import digits, write_idx_digits

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_mnist_is_read_where_it_lies(tmp_path, zipped, place):
    write_idx_digits(tmp_path / place, zipped=zipped)
    (images, labels), (held_out, _) = digits()
    found = data.MNIST(str(tmp_path), train=True)
    assert len(found) == len(labels)
    assert np.array_equal(found.targets, labels)
    x, y = found[3]
    assert (x.dtype, x.shape, y) == (np.float32, (1, 8, 8), labels[3])
    assert np.allclose(x[0] * 255, images[3])
    assert len(data.MNIST(root=tmp_path, train=False, download=True)) == len(held_out)


def test_missing_files_are_said_with_the_place_where_they_go(tmp_path):
    with pytest.raises(DataError, match=f"{IMAGES}: no such file; download it.*{IMAGES}.gz.*MNIST/raw"):
        data.MNIST(tmp_path, download=True)


def idx(shape, content, kind=8):
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + content


HOSTILE = {
    "empty": (b"", "not an IDX file"),
    "floats": (idx((2, 2, 2), bytes(32), kind=13), "not an IDX file of bytes"),
    "labels in its place": (idx((8,), bytes(8)), "not an IDX file of bytes with 3 axes"),
    "short": (idx((2, 2, 2), bytes(7)), "announces 8 values, found 7"),
    "long": (idx((2, 2, 2), bytes(9)), "announces 8 values, found more"),
    "none": (idx((0, 2, 2), b""), "invalid shape 0 x 2 x 2"),
    "huge": (idx((2**32 - 1, 2**12, 2**12), b""), "invalid shape 4294967295 x 4096 x 4096"),
    "wide": (idx((1, 1, 2**31), b""), "invalid shape 1 x 1 x 2147483648"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("zipped", [False, True])
def test_files_that_are_not_what_they_say_are_refused(tmp_path, name, zipped):
    content, words = HOSTILE[name]
    write_idx_digits(tmp_path, zipped=zipped)
    path = tmp_path / (IMAGES + (".gz" if zipped else ""))
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataError, match=f"{path.name}: .*{words}"):
        data.MNIST(tmp_path)


def test_a_packed_bomb_is_not_unpacked(tmp_path):
    write_idx_digits(tmp_path, zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(idx((2, 2, 2), b""))
        for _ in range(64):
            file.write(bytes(1 << 20))
    read = []

    class Counted(gzip.GzipFile):
        def read(self, size=-1):
            read.append(size)
            return super().read(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist.gzip, "open", Counted)
        with pytest.raises(DataError, match="found more"):
            data.MNIST(tmp_path)
    assert read == [16, 9]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_torn_gzip_file_is_refused(tmp_path, share):
    write_idx_digits(tmp_path, zipped=True)
    path = tmp_path / f"{LABELS}.gz"
    content = path.read_bytes()
    path.write_bytes(content[: max(5, int(share * len(content)))])
    with pytest.raises(DataError, match=f"{path.name}: truncated or damaged gzip file"):
        data.MNIST(tmp_path)


def test_labels_of_other_pictures_are_refused(tmp_path):
    write_idx_digits(tmp_path)
    (tmp_path / LABELS).write_bytes(idx((3,), bytes(3)))
    with pytest.raises(DataError, match="3 labels for 1400 images"):
        data.MNIST(tmp_path)
