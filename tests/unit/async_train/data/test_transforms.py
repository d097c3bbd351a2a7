"""Image transforms."""

import numpy as np
import pytest

from edgeasync.async_train.data import transforms
from edgeasync.errors import ConfigError, DataError


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
    with pytest.raises(DataError, match="use ToTensor before"):
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
