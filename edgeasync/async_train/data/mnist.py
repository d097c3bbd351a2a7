"""MNIST, and other pictures in IDX files, where they lie."""

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
"""A file that says it has more values is not believed."""

SIDE_MAX = 4096
"""A file that says it has larger pictures is not believed."""


class MNIST:
    """Handwritten digits: pictures float32 (1, 28, 28) from 0 to 1, and their classes.

    `root`, or `root/MNIST/raw`, has four files `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
    `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, plain or as `.gz`. Other pictures in such files are
    read, too. A `transform` is given a picture, uint8 (28, 28). `download` is ignored.

    Raises `DataError` for files that are missing, or are not sound.
    """

    lazy = False

    def __init__(
        self,
        root: str | Path,
        train: bool = True,  # noqa: FBT001, FBT002 - as torchvision has it
        transform: Callable[[Any], Any] | None = None,
        *,
        download: bool = False,
    ) -> None:
        ignore("MNIST", "nothing is downloaded, files are read where they lie", download=download or None)
        part = "train" if train else "t10k"
        self.data = read_idx(_find(Path(root).expanduser(), f"{part}-images-idx3-ubyte"), 3)
        path = _find(Path(root).expanduser(), f"{part}-labels-idx1-ubyte")
        self.targets = read_idx(path, 1).astype(np.int64)
        if len(self.targets) != len(self.data):
            raise DataError(
                f"{path}: {len(self.targets)} labels for {len(self.data)} pictures; get both files again"
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
        f"{tried[0]}: no such file; nothing is downloaded, so put the file there, plain or as {name}.gz, or into "
        f"{root / 'MNIST' / 'raw'}"
    )


def read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """Read an IDX file of bytes with this number of axes; raises `DataError` unless it is sound."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return _read(cast("BinaryIO", file), axes, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}); get it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(file: BinaryIO, axes: int, path: Path) -> npt.NDArray[np.uint8]:
    header = file.read(4 + 4 * axes)
    if len(header) < 4 + 4 * axes or header[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path}: not an IDX file of bytes with {axes} axes; get it again")
    shape = struct.unpack(f">{axes}I", header[4:])
    size = math.prod(shape)
    if not size or size > BYTES_MAX or max(shape[1:], default=1) > SIDE_MAX:
        raise DataError(f"{path}: says it has {' x '.join(map(str, shape))} values; get it again")
    # No more is unpacked than the header says, whatever a packed file holds.
    content = file.read(size + 1)
    if len(content) != size:
        found = "more" if len(content) > size else str(len(content))
        raise DataError(f"{path}: says it has {size} values, and has {found}; get it again")
    return np.frombuffer(content, np.uint8).reshape(shape)
