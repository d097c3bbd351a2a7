"""MNIST and other images in IDX files, read in place."""

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from edgeasync.async_train.data.transforms import ToTensor
from edgeasync.async_train.ignored import ignore
from edgeasync.errors import DataError

BYTES_MAX = 1 << 30
"""Maximum number of values in a file, according to its header; larger files are rejected."""

SIDE_MAX = 4096
"""Maximum height and width of images, according to the file's header; others are rejected."""


class MNIST:
    """Handwritten digits as float32 (1, 28, 28) from 0 to 1, with class numbers.

    `root` or `root/MNIST/raw` contains four files `train-images-idx3-ubyte`,
    `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, plain or as
    `.gz`. Other data sets in the same format can be read, too. `transform` is called with an image
    as uint8 (28, 28). `download` is ignored.

    Raises `DataError` for missing or damaged files.
    """

    lazy = False

    def __init__(
        self,
        root: str | Path,
        train: bool = True,  # noqa: FBT001, FBT002 - like torchvision
        transform: Callable[[Any], Any] | None = None,
        *,
        download: bool = False,
    ) -> None:
        ignore("MNIST", "files are read in place, nothing is downloaded", download=download or None)
        part = "train" if train else "t10k"
        self.data = read_idx(_find(Path(root).expanduser(), f"{part}-images-idx3-ubyte"), 3)
        path = _find(Path(root).expanduser(), f"{part}-labels-idx1-ubyte")
        self.targets = read_idx(path, 1).astype(np.int64)
        if len(self.targets) != len(self.data):
            raise DataError(
                f"{path}: {len(self.targets)} labels for {len(self.data)} images; download both files again"
            )
        self._transform = ToTensor() if transform is None else transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self.data[index]), int(self.targets[index])


def _find(root: Path, name: str) -> Path:
    tried = [folder / (name + end) for folder in (root, root / "MNIST" / "raw") for end in ("", ".gz")]
    for path in tried:
        if path.is_file():
            return path
    raise DataError(
        f"{tried[0]}: no such file; download it and store it there, plain or as {name}.gz, or in "
        f"{root / 'MNIST' / 'raw'}"
    )


def read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of bytes with `axes` axes; raises `DataError` if it is damaged."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return _read(cast("BinaryIO", file), axes, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated or damaged gzip file ({error}); download it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(file: BinaryIO, axes: int, path: Path) -> npt.NDArray[np.uint8]:
    header = file.read(4 + 4 * axes)
    if len(header) < 4 + 4 * axes or header[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path}: not an IDX file of bytes with {axes} axes; download it again")
    shape = struct.unpack(f">{axes}I", header[4:])
    size = math.prod(shape)
    if not size or size > BYTES_MAX or max(shape[1:], default=1) > SIDE_MAX:
        raise DataError(f"{path}: invalid shape {' x '.join(map(str, shape))} in the header; download it again")
    # Never decompress more than the header announces.
    content = file.read(size + 1)
    if len(content) != size:
        found = "more" if len(content) > size else str(len(content))
        raise DataError(f"{path}: the header announces {size} values, found {found}; download it again")
    return np.frombuffer(content, np.uint8).reshape(shape)
