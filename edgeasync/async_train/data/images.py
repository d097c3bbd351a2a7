"""Folders of pictures, a folder for each class; needs Pillow: pip install 'edgeasync[images]'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeasync.async_train.data.transforms import ToTensor, pillow
from edgeasync.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

PIXELS_MAX = 1 << 26
"""A larger picture, of 64 million pixels, is not unpacked."""


class ImageFolder:
    """Pictures float32 (3, height, width) and the numbers of their classes, by the folders' names in order.

    Only names are read at first; a picture is read each time it is looked at. A `transform` is given a picture,
    uint8 (height, width, 3).

    Raises `DataError` for a folder without pictures and, at a look, for a file that is none.
    """

    lazy = True
    """Its examples are read when they are looked at."""

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
                f"{folder}: no pictures; put a folder for each class there, with its {', '.join(SUFFIXES)}"
            )
        self.targets = [number for _, number in self.samples]
        self._transform = ToTensor() if transform is None else transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, number = self.samples[index]
        return self._transform(read_picture(path)), number


class ImageNet(ImageFolder):
    """ImageNet as `ImageFolder` reads it: the classes are folders in `root/train` and `root/val`."""

    def __init__(
        self, root: str | Path, split: str = "train", transform: Callable[[Any], Any] | None = None
    ) -> None:
        if split not in ("train", "val"):
            raise DataError(f"split is {split!r}; give 'train' or 'val'")
        super().__init__(Path(root) / split, transform)


def read_picture(path: Path) -> npt.NDArray[np.uint8]:
    """Read a picture as uint8 (height, width, 3); raises `DataError` for a file that is none, or too large."""
    image = pillow()
    try:
        with image.open(path) as opened:
            width, height = opened.size
            if width * height > PIXELS_MAX:
                raise DataError(f"{path}: {width} x {height} pixels; make it smaller, at most {PIXELS_MAX} in all")
            return np.asarray(opened.convert("RGB"))
    except (
        MemoryError,
        OSError,
        ValueError,
        SyntaxError,
        image.DecompressionBombError,
        image.DecompressionBombWarning,
    ) as error:
        raise DataError(f"{path}: not a picture that can be read ({error}); remove or replace it") from error
