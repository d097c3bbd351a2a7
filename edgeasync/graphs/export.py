"""Exports a trained model to other programs, as ONNX for inference or as named arrays."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgeasync.durable.files import replace_file
from edgeasync.durable.tensors import tensor_parts
from edgeasync.errors import ConfigError
from edgeasync.graphs.model_file import VALUES_SUFFIX
from edgeasync.parameters import Arrays

ONNX_SUFFIX = ".onnx"
NPZ_SUFFIX = ".npz"
SUFFIXES = (ONNX_SUFFIX, VALUES_SUFFIX, NPZ_SUFFIX)


def check_export_file(name: str, path: Path) -> None:
    """Raise `ConfigError` if `path`, the value of the option `name`, is no file to export to.

    Its suffix must be supported. A file with examples, perhaps their only copy, is not replaced.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{name} {path}: the file name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if path.suffix == NPZ_SUFFIX and path.is_file() and _has_examples(path):
        raise ConfigError(f"{name} {path}: contains examples, which would be lost; choose another name")


def _has_examples(path: Path) -> bool:
    """Return whether a file is a dataset, which has the arrays `x` and `y`."""
    try:
        with zipfile.ZipFile(path) as file:
            return {"x.npy", "y.npy"} <= set(file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def refuse_onnx(name: str, path: Path) -> ConfigError:
    """Return the error for an ONNX export of a model that has no graph."""
    return ConfigError(
        f"{name} {path}: only ONNX and edgeasync.nn models can be exported as ONNX; for the arrays alone use "
        f"{path.stem + VALUES_SUFFIX} or {path.stem + NPZ_SUFFIX}"
    )


def write_arrays(path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None) -> None:
    """Write named arrays to a `.npz` file, or to a safetensors file that includes `metadata`.

    The suffix of `path` determines the format. Raises `StorageError`.
    """
    if path.suffix == NPZ_SUFFIX:
        replace_file(path, _npz(arrays), private=False)
    else:
        replace_file(path, *tensor_parts(arrays, dict(metadata or {})), private=False)


def _npz(arrays: Arrays) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:  # numpy.savez rejects an array named "file"
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, array)
    return content.getvalue()
