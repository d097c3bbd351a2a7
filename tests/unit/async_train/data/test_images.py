"""Image folders: lazy loading, and errors for files that cannot be read."""

import struct

import numpy as np
import pytest

from edgeasync.async_train import data
from edgeasync.async_train.adapters import as_data
from edgeasync.async_train.data import transforms
from edgeasync.errors import DataError


def pictures(folder, sizes=((8, 12), (16, 8)), names=("cat", "dog")):
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for place, (height, width) in enumerate(sizes):
            values = random.integers(0, 50, (height, width, 3)) + 200 * number
            image.fromarray(values.astype(np.uint8)).save(folder / name / f"{place}.png")
    return folder


def test_folders_of_pictures_are_read_when_they_are_looked_at(tmp_path):
    pictures(tmp_path / "train")
    found = data.ImageNet(
        str(tmp_path),
        split="train",
        transform=transforms.Compose([transforms.Resize(8), transforms.CenterCrop(8), transforms.ToTensor()]),
    )
    assert (found.classes, found.targets) == (["cat", "dog"], [0, 0, 1, 1])
    x, y = next(iter(data.DataLoader(found, batch_size=4)))
    assert (x.dtype, x.shape, y.tolist()) == (np.float32, (4, 3, 8, 8), [0, 0, 1, 1])
    assert x[:2].max() < 0.3
    assert x[2:].min() > 0.7
    examples = as_data(data.Subset(found, [1, 3]))
    assert not isinstance(examples.features, np.ndarray)
    assert np.array_equal(examples.features[[1]], x[3:])
    (tmp_path / "train/dog/1.png").unlink()
    assert examples.features[[0]].shape == (1, 3, 8, 8)
    with pytest.raises(DataError, match=r"1\.png: not a readable image"):
        examples.features[[1]]


def test_pictures_of_several_sizes_need_a_transform(tmp_path):
    with pytest.raises(DataError, match=r"shapes \(3, 8, 12\) and \(3, 16, 8\).*Resize"):
        next(iter(data.DataLoader(data.ImageFolder(pictures(tmp_path)), batch_size=4)))


def test_folders_that_have_no_pictures_are_refused(tmp_path):
    pytest.importorskip("PIL.Image")
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="create one folder per class"):
            data.ImageFolder(place)
    with pytest.raises(DataError, match="choose 'train' or 'val'"):
        data.ImageNet(tmp_path, split="test")


def test_a_picture_that_is_too_large_is_not_unpacked(tmp_path):
    folder = pictures(tmp_path)
    content = bytearray((folder / "cat/0.png").read_bytes())
    content[16:24] = struct.pack(">II", 1 << 15, 1 << 15)  # what the header says
    (folder / "cat/0.png").write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"0\.png"):
        data.ImageFolder(folder)[0]
