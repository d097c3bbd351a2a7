"""Reads a device's data from `.npz` files, or from `.csv` files with a header row."""

import csv
import io
import math
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgeasync.data.dataset import Dataset
from edgeasync.errors import DataError
from edgeasync.regular_file import open_regular

INPUT_PREFIX = "x."
"""Prefix of array names in an archive that contains several inputs."""


def load(path: Path) -> Dataset:
    """Read the examples of a file. The format depends on its suffix.

    - `.npz`: the array `x` contains the examples, real numbers or token ids of shape
      (n, features...). A model with several inputs needs an array `x.NAME` for each input. The
      array `y` contains the targets: integers of at least 0 are labels, and floats are values. If
      `y` is missing, every example is its own target.
    - `.csv`: a header row is followed by one example per line. The target is in column `y`, or in
      the last column if there is no `y`. If all targets are integers of at least 0, they are
      labels. All other columns are features.

    Raises `DataError` if the file is invalid. The message names the file and, for CSV, the line and
    column.

    >>> from pathlib import Path
    >>> import numpy as np
    >>> from edgeasync.data import load
    >>> np.savez("readings.npz", x=np.eye(4), y=[0, 1, 0, 1])
    >>> load(Path("readings.npz")).y
    array([0, 1, 0, 1])
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: cannot read {path.suffix or 'a file without suffix'}; use {' or '.join(_READERS)}"
        )
    try:
        return reader(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; pass the path of a {' or '.join(_READERS)} file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _load_npz(path: Path) -> Dataset:
    try:
        with open_regular(path) as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: contains a single array; save x and y with numpy.savez")
            inputs = [name for name in archive.files if name.startswith(INPUT_PREFIX)]
            if inputs and "x" in archive.files:
                raise DataError(
                    f"{path}: has both x and {inputs[0]}; use x for one input, or x.NAME for each of several"
                )
            for name in ("y",) if inputs else ("x", "y"):
                if name not in archive.files and archive.files != ["x"]:
                    names = ", ".join(archive.files) or "nothing"
                    raise DataError(f"{path}: array {name!r} is missing, found {names}; save it as {name!r}")
            x: Any = (
                {name.removeprefix(INPUT_PREFIX): archive[name] for name in inputs} if inputs else archive["x"]
            )
            y = archive["y"] if "y" in archive.files else x
    except MemoryError as error:
        raise DataError(
            f"{path}: not enough memory for its arrays; use fewer examples, or save the file again if it is "
            "damaged"
        ) from error
    # The error for a damaged archive depends on which byte is wrong.
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable npz file of plain arrays; save it with numpy.savez") from error
    return Dataset.of(x, y, where=str(path))


def _load_csv(path: Path) -> Dataset:
    # Typed arrays need 4 bytes per value, a list of floats 32.
    features, targets = array("f"), array("d")
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            header = _header(rows, path)
            label_column = header.index("y") if "y" in header else len(header) - 1
            for row in rows:
                if not row:
                    continue
                where = f"{path}: line {rows.line_num}"
                if len(row) != len(header):
                    raise DataError(
                        f"{where}: {len(row)} columns, but the header has {len(header)}; correct the line"
                    )
                targets.extend(_numbers([row.pop(label_column)], header[label_column : label_column + 1], where))
                features.extend(_numbers(row, header[:label_column] + header[label_column + 1 :], where))
    except MemoryError as error:
        raise DataError(f"{path}: not enough memory for this file; use fewer examples") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8: {error}") from error
    if not targets:
        raise DataError(f"{path}: no examples below the header; add at least one")
    x, y = np.frombuffer(features, np.float32).reshape(len(targets), -1), np.frombuffer(targets)
    labels = bool((y == np.floor(y)).all() and y.min() >= 0 and y.max() < 2**53)
    return Dataset.of(x, y.astype(np.int64) if labels else y, where=str(path))


def _header(rows: Iterator[list[str]], path: Path) -> list[str]:
    header = [name.strip() for name in next(rows, [])]
    if len(header) < 2:
        raise DataError(f"{path}: the header has {len(header)} columns; it needs features and a label")
    if all(_finite(name) is not None for name in header):
        raise DataError(f"{path}: the first row contains numbers; insert a header row with column names above it")
    return header


def _numbers(texts: list[str], columns: list[str], where: str) -> list[float]:
    try:
        numbers = [float(text) for text in texts]
        if all(map(math.isfinite, numbers)):
            return numbers
    except ValueError:
        pass
    column, text = next(cell for cell in zip(columns, texts, strict=True) if _finite(cell[1]) is None)
    raise DataError(f"{where}, column {column!r}: {text!r} is not a finite number; correct or remove the line")


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


_READERS: dict[str, Callable[[Path], Dataset]] = {".npz": _load_npz, ".csv": _load_csv}
