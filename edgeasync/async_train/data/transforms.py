"""Transforms of images before training.

Before `ToTensor`, an image is uint8 (height, width) or (height, width, 3); afterwards, it is
float32 (channels, height, width). Random transforms have a seed: with the same seed and the same
order of accesses, they return the same images.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.async_train.arrays import Array, as_array
from edgeasync.errors import ConfigError, DataError

__all__ = [
    "CenterCrop",
    "Compose",
    "Normalize",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "ToTensor",
]

Picture = npt.NDArray[Any]


class Compose:
    """Applies transforms one after another.

    >>> import numpy as np
    >>> from edgeasync.async_train.data import transforms
    >>> prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    >>> prepare(np.zeros((28, 28), np.uint8)).min().item()
    -1.0
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self._transforms = list(transforms)

    def __call__(self, picture: Any) -> Any:
        """Apply all transforms."""
        for transform in self._transforms:
            picture = transform(picture)
        return picture


class ToTensor:
    """Converts an image of bytes to float32 (channels, height, width) from 0 to 1.

    Float images are only converted to float32.
    """

    def __call__(self, picture: Any) -> Array:
        """Return the array."""
        values = np.asarray(picture)
        if values.dtype.kind == "f":
            return as_array(values.astype(np.float32, copy=False))
        planes = values[None] if values.ndim == 2 else np.moveaxis(values, -1, 0)
        return as_array(np.ascontiguousarray(planes, np.float32) / np.float32(255))


class Normalize:
    """Computes `(value - mean) / std` for each channel."""

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self._mean = np.asarray(mean, np.float32).reshape(-1, 1, 1)
        self._std = np.asarray(std, np.float32).reshape(-1, 1, 1)
        if not (self._std > 0).all():
            raise ConfigError(f"std is {std!r}; pass numbers above 0")

    def __call__(self, picture: Any) -> Array:
        """Return the normalized image.

        Raises `DataError` if the image contains bytes, or has another number of channels than the
        mean.
        """
        values = np.asarray(picture)
        if values.dtype.kind != "f" or len(self._mean) not in (1, len(values)):
            raise DataError(
                f"Normalize got {values.dtype} of shape {values.shape}; use ToTensor before it, and pass one mean "
                "and std per channel"
            )
        return as_array((values - self._mean) / self._std)


class Resize:
    """Resizes an image to `(height, width)`; needs Pillow.

    If `size` is a number, it is the new length of the shorter side.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        self._size = size if isinstance(size, int) else (int(size[0]), int(size[1]))

    def __call__(self, picture: Any) -> Picture:
        """Return the resized image."""
        values = np.asarray(picture)
        if isinstance(self._size, tuple):
            return resized(values, *self._size)
        height, width = _sides(values)
        scale = self._size / min(height, width)
        return resized(values, max(1, round(height * scale)), max(1, round(width * scale)))


class CenterCrop:
    """Crops the center of an image; smaller images get a black border."""

    def __init__(self, size: int | Sequence[int]) -> None:
        self._size = _pair(size)

    def __call__(self, picture: Any) -> Picture:
        """Return the center."""
        values = np.asarray(picture)
        lacks = [max(0, want - have) for want, have in zip(self._size, _sides(values), strict=True)]
        if any(lacks):
            border = [(lack // 2, lack - lack // 2) for lack in lacks]
            rest = [(0, 0)] * (values.ndim - 2)
            values = np.pad(values, [*rest, *border] if values.dtype.kind == "f" else [*border, *rest])
        (height, width), (rows, columns) = _sides(values), self._size
        return cropped(values, (height - rows) // 2, (width - columns) // 2, rows, columns)


class RandomResizedCrop:
    """Crops and resizes a random part of the image; needs Pillow.

    The part covers a fraction of the image's area in the range `scale`. Its aspect ratio is in the
    range `ratio`.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        *,
        seed: int = 0,
    ) -> None:
        self._size, self._scale, self._ratio = _pair(size), scale, ratio
        self._random = np.random.default_rng(seed)

    def __call__(self, picture: Any) -> Picture:
        """Return the resized part; if ten random parts do not fit, resize the whole image."""
        values = np.asarray(picture)
        height, width = _sides(values)
        for _ in range(10):
            area = height * width * self._random.uniform(*self._scale)
            ratio = math.exp(self._random.uniform(math.log(self._ratio[0]), math.log(self._ratio[1])))
            rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < rows <= height and 0 < columns <= width:
                top, left = self._random.integers((height - rows + 1, width - columns + 1))
                return resized(cropped(values, int(top), int(left), rows, columns), *self._size)
        return resized(values, *self._size)


class RandomHorizontalFlip:
    """Mirrors the image with probability `p`."""

    def __init__(self, p: float = 0.5, *, seed: int = 0) -> None:
        self._p = p
        self._random = np.random.default_rng(seed)

    def __call__(self, picture: Any) -> Picture:
        """Return the image or its mirror image."""
        values = np.asarray(picture)
        if self._random.random() >= self._p:
            return values
        return np.flip(values, _axes(values)[1])


def pillow() -> Any:
    """Import Pillow's image module; raises `ConfigError` if it is not installed."""
    try:
        from PIL import Image  # noqa: PLC0415 - optional
    except ModuleNotFoundError:
        raise ConfigError("images need the package Pillow: run pip install 'edgeasync[images]'") from None
    return Image


def resized(values: Picture, height: int, width: int) -> Picture:
    """Resize an image by bilinear interpolation."""
    if _sides(values) == (height, width):
        return values
    image = pillow()
    size = (width, height)
    if values.dtype.kind == "f":
        planes = [image.fromarray(np.ascontiguousarray(plane)).resize(size, image.BILINEAR) for plane in values]
        return np.stack([np.asarray(plane) for plane in planes])
    return np.asarray(image.fromarray(np.ascontiguousarray(values)).resize(size, image.BILINEAR))


def cropped(values: Picture, top: int, left: int, height: int, width: int) -> Picture:
    """Crop an image."""
    part: list[slice] = [slice(None)] * values.ndim
    rows, columns = _axes(values)
    part[rows], part[columns] = slice(top, top + height), slice(left, left + width)
    return values[tuple(part)]


def _axes(values: Picture) -> tuple[int, int]:
    """Return the axes of height and width."""
    return (values.ndim - 2, values.ndim - 1) if values.dtype.kind == "f" else (0, 1)


def _sides(values: Picture) -> tuple[int, int]:
    rows, columns = _axes(values)
    return values.shape[rows], values.shape[columns]


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
