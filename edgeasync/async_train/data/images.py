"""Datasets of images in one folder per class; needs Pillow: pip install 'edgeasync[images]'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.async_train.data.transforms import ToTensor, pillow
from edgeasync.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

PIXELS_MAX = 1 << 26
"""Maximum number of pixels of an image (64 megapixels); larger images are not decoded."""


class ImageFolder:
    """Images in one folder per class, as float32 (3, height, width) with class numbers.

    Classes are numbered in the order of their folders' names. Creating the dataset reads only file
    names; an image is decoded at each access. `transform` is called with an image as uint8 (height,
    width, 3).

    Raises `DataError` if there are no images. Accessing an example raises `DataError` if its file
    is not an image.
    """

    lazy = True
    """Whether examples are read at each access."""

    def __init__(self, root: str | Path, transform: Callable[[Any], Any] | None = None) -> None:
        pillow()
        folder = Path(root).expanduser().absolute()
        self.classes = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
        self.samples = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.samples:
            raise DataError(
                f"{folder}: no images found; create one folder per class with {', '.join(SUFFIXES)} files"
            )
        self.targets = [number for _, number in self.samples]
        self._transform = ToTensor() if transform is None else transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, number = self.samples[index]
        return self._transform(read_picture(path)), number


class ImageNet(ImageFolder):
    """ImageNet as an `ImageFolder`, with class folders in `root/train` and `root/val`."""

    def __init__(
        self, root: str | Path, split: str = "train", transform: Callable[[Any], Any] | None = None
    ) -> None:
        if split not in ("train", "val"):
            raise DataError(f"split is {split!r}; choose 'train' or 'val'")
        super().__init__(Path(root) / split, transform)


def read_picture(path: Path) -> npt.NDArray[np.uint8]:
    """Read an image as uint8 (height, width, 3); raises `DataError` if it is invalid or too large."""
    image = pillow()
    try:
        with image.open(path) as opened:
            width, height = opened.size
            if width * height > PIXELS_MAX:
                raise DataError(
                    f"{path}: {width} x {height} pixels; reduce it to at most {PIXELS_MAX} pixels in all"
                )
            return np.asarray(opened.convert("RGB"))
    except (
        MemoryError,
        OSError,
        ValueError,
        SyntaxError,
        image.DecompressionBombError,
        image.DecompressionBombWarning,
    ) as error:
        raise DataError(f"{path}: not a readable image ({error}); remove or replace it") from error
