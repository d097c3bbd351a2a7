"""Datasets where they lie, loaders, and transforms; files that are not what they say are refused by name."""

import gzip
import logging
import struct

import numpy as np
import pytest

from edgeasync import Dataset
from edgeasync.async_train import data
from edgeasync.async_train.data import mnist, transforms
from edgeasync.async_train.given import as_data
from edgeasync.errors import ConfigError, DataError
from examples.async_train.digits_idx import digits, write_idx_digits

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def pictures(folder, sizes=((8, 12), (16, 8)), names=("cat", "dog")):
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for place, (height, width) in enumerate(sizes):
            values = random.integers(0, 50, (height, width, 3)) + 200 * number
            image.fromarray(values.astype(np.uint8)).save(folder / name / f"{place}.png")
    return folder


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
    with pytest.raises(DataError, match=f"{IMAGES}: no such file; nothing is downloaded.*{IMAGES}.gz.*MNIST/raw"):
        data.MNIST(tmp_path, download=True)


def idx(shape, content, kind=8):
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + content


HOSTILE = {
    "empty": (b"", "not an IDX file"),
    "floats": (idx((2, 2, 2), bytes(32), kind=13), "not an IDX file of bytes"),
    "labels in its place": (idx((8,), bytes(8)), "not an IDX file of bytes with 3 axes"),
    "short": (idx((2, 2, 2), bytes(7)), "says it has 8 values, and has 7"),
    "long": (idx((2, 2, 2), bytes(9)), "says it has 8 values, and has more"),
    "none": (idx((0, 2, 2), b""), "says it has 0 x 2 x 2"),
    "huge": (idx((2**32 - 1, 2**12, 2**12), b""), "says it has 4294967295 x 4096 x 4096"),
    "wide": (idx((1, 1, 2**31), b""), "says it has 1 x 1 x 2147483648"),
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
        with pytest.raises(DataError, match="and has more"):
            data.MNIST(tmp_path)
    assert read == [16, 9]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_torn_gzip_file_is_refused(tmp_path, share):
    write_idx_digits(tmp_path, zipped=True)
    path = tmp_path / f"{LABELS}.gz"
    content = path.read_bytes()
    path.write_bytes(content[: max(5, int(share * len(content)))])
    with pytest.raises(DataError, match=f"{path.name}: not a whole gzip file"):
        data.MNIST(tmp_path)


def test_labels_of_other_pictures_are_refused(tmp_path):
    write_idx_digits(tmp_path)
    (tmp_path / LABELS).write_bytes(idx((3,), bytes(3)))
    with pytest.raises(DataError, match="3 labels for 1400 pictures"):
        data.MNIST(tmp_path)


def test_a_loader_gives_every_example_once_in_an_order_of_its_seed():
    given = Dataset.of(np.arange(10.0)[:, None], np.arange(10))
    loader = data.DataLoader(given, batch_size=4, shuffle=True, seed=5)
    assert len(loader) == 3
    passes = [np.concatenate([y for _, y in loader]).tolist() for _ in range(2)]
    assert passes[0] != passes[1]
    assert all(sorted(each) == list(range(10)) for each in passes)
    again = data.DataLoader(given, batch_size=4, shuffle=True, seed=5)
    again.epoch = 1
    assert np.concatenate([y for _, y in again]).tolist() == passes[1]
    dropping = data.DataLoader(given, batch_size=4, drop_last=True)
    assert [len(x.to("cuda")) for x, _ in dropping] == [4, 4] == [4] * len(dropping)


def test_a_subset_has_the_items_at_its_indices(tmp_path):
    digits_ = data.MNIST(write_idx_digits(tmp_path))
    part = data.Subset(data.Subset(digits_, range(100, 200)), [3, 1])
    assert np.array_equal(part[0][0], digits_[103][0])
    assert part.targets.tolist() == digits_.targets[[103, 101]].tolist()
    with pytest.raises(DataError, match="beyond the 1400"):
        data.Subset(digits_, [1400])


def test_workers_and_pinned_memory_are_ignored_and_said_once(caplog):
    with caplog.at_level(logging.WARNING, "edgeasync.async_train"):
        for _ in range(2):
            data.DataLoader([([0.0], 0)], batch_size=1, num_workers=4, pin_memory=True)
    said = [record.message for record in caplog.records if record.message.startswith("DataLoader")]
    assert sorted(said) == sorted(set(said))
    with pytest.raises(TypeError, match="pinmemory"):
        data.DataLoader([([0.0], 0)], pinmemory=True)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        data.DataLoader([([0.0], 0)], batch_size=0)


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
    with pytest.raises(DataError, match=r"1\.png: not a picture that can be read"):
        examples.features[[1]]


def test_pictures_of_several_sizes_need_a_transform(tmp_path):
    with pytest.raises(DataError, match=r"shapes \(3, 8, 12\) and \(3, 16, 8\).*Resize"):
        next(iter(data.DataLoader(data.ImageFolder(pictures(tmp_path)), batch_size=4)))


def test_folders_that_have_no_pictures_are_refused(tmp_path):
    pytest.importorskip("PIL.Image")
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="put a folder for each class there"):
            data.ImageFolder(place)
    with pytest.raises(DataError, match="give 'train' or 'val'"):
        data.ImageNet(tmp_path, split="test")


def test_a_picture_that_is_too_large_is_not_unpacked(tmp_path):
    folder = pictures(tmp_path)
    content = bytearray((folder / "cat/0.png").read_bytes())
    content[16:24] = struct.pack(">II", 1 << 15, 1 << 15)  # what the header says
    (folder / "cat/0.png").write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"0\.png"):
        data.ImageFolder(folder)[0]


def test_transforms_are_those_of_the_arithmetic():
    picture = np.arange(12, dtype=np.uint8).reshape(3, 4)
    tensor = transforms.ToTensor()(picture)
    assert np.allclose(tensor, picture[None] / 255)
    assert np.allclose(transforms.Normalize((0.5,), (0.25,))(tensor), (picture[None] / 255 - 0.5) / 0.25)
    assert transforms.CenterCrop(2)(picture).tolist() == [[1, 2], [5, 6]]
    assert np.array_equal(transforms.CenterCrop((2, 2))(tensor)[0] * 255, [[1, 2], [5, 6]])
    assert transforms.CenterCrop((5, 4))(picture)[:, 0].tolist() == [0, 0, 4, 8, 0]
    assert np.array_equal(transforms.RandomHorizontalFlip(p=1.0)(picture), picture[:, ::-1])
    assert np.array_equal(transforms.RandomHorizontalFlip(p=1.0)(tensor), tensor[:, :, ::-1])
    assert transforms.RandomHorizontalFlip(p=0.0)(picture) is picture
    with pytest.raises(DataError, match="put ToTensor before"):
        transforms.Normalize((0.5,), (0.5,))(picture)
    with pytest.raises(ConfigError, match="above 0"):
        transforms.Normalize((0.5,), (0.0,))


def test_pictures_are_resized_before_and_after_they_are_floats():
    pytest.importorskip("PIL.Image")
    picture = np.tile(np.linspace(0, 255, 32).astype(np.uint8)[None, :, None], (16, 1, 3))
    small = transforms.Resize(8)(picture)
    assert small.shape == (8, 16, 3)
    floats = transforms.Resize((8, 16))(transforms.ToTensor()(picture))
    assert np.abs(floats * 255 - np.moveaxis(small, -1, 0)).max() <= 1.0


def test_what_is_random_follows_the_seed():
    pytest.importorskip("PIL.Image")
    picture = np.random.default_rng(0).integers(0, 255, (20, 30, 3)).astype(np.uint8)
    crops = [transforms.RandomResizedCrop(8, seed=seed) for seed in (1, 1, 2)]
    first, same, other = ([crop(picture) for _ in range(4)] for crop in crops)
    assert all(crop.shape == (8, 8, 3) for crop in first)
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert not np.array_equal(first[0], first[1])
