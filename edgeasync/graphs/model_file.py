"""A run's model as a safetensors file. Apart from other files: a device reads and writes none."""

import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors

from edgeasync.core.hub.events import Evaluated
from edgeasync.durable.files import replace_file
from edgeasync.durable.tensors import tensor_parts
from edgeasync.errors import ModelMismatchError, StorageError
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.regular_file import check_regular

VALUES_SUFFIX = ".safetensors"

DIVERGED = "training has diverged: values of the model are not finite"


class SavedModel(msgspec.Struct, frozen=True):
    """A model's named arrays, its lineage and version, what it was worth if that was written down, and when."""

    arrays: dict[str, npt.NDArray[np.float32]]
    lineage: str
    version: int
    evaluation: Evaluated | None
    saved_s: float


def save_model(
    path: Path,
    spec: ParameterSpec,
    vector: Vector,
    *,
    lineage: str,
    version: int,
    evaluation: Evaluated | None = None,
    private: bool = True,
) -> None:
    """Write the model's named arrays to a safetensors file, for its owner alone if `private`.

    Raises `StorageError`.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    metadata = {"format": "edgeasync", "lineage": lineage, "version": str(version), "time": now}
    if evaluation is not None:
        metadata["loss"] = repr(evaluation.loss)
        if evaluation.accuracy is not None:
            metadata["accuracy"] = repr(evaluation.accuracy)
    replace_file(path, *tensor_parts(spec.views(vector), metadata), private=private)


def check_finite(path: Path, vector: Vector, *, diverged: bool = False) -> None:
    """Raise `StorageError` if values of a model that is to be written are not finite, or training `diverged`."""
    if diverged or not np.isfinite(vector).all():
        raise StorageError(f"{path}: not written, for {DIVERGED}")


def read_model(path: Path) -> SavedModel:
    """Read a model that `save_model` or another maker wrote; raises `StorageError` if it is not readable."""
    return _read(path, arrays=True)


def read_header(path: Path) -> SavedModel:
    """Read a model as `read_model` does, without its arrays."""
    return _read(path, arrays=False)


def _read(path: Path, *, arrays: bool) -> SavedModel:
    try:
        check_regular(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            found = {name: file.get_tensor(name) for name in (file.keys() if arrays else ())}
            metadata = file.metadata() or {}
        if metadata.get("format") != "edgeasync":
            metadata = {}  # what another maker wrote there means something else
        version = max(0, int(metadata.get("version", "0")))
        evaluation = None
        if "loss" in metadata:
            accuracy = float(metadata["accuracy"]) if "accuracy" in metadata else None
            evaluation = Evaluated(version, float(metadata["loss"]), accuracy)
        time = metadata.get("time")
        saved_s = (
            path.stat().st_mtime if time is None else datetime.fromisoformat(time).astimezone(UTC).timestamp()
        )
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file; give the folder of a run that has saved its model") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}; move it away") from error
    except (MemoryError, ValueError, OverflowError, safetensors.SafetensorError) as error:
        raise StorageError(f"{path}: not a readable safetensors file ({error}); move it away") from error
    return SavedModel(found, metadata.get("lineage", ""), version, evaluation, saved_s)


def load_kept(path: Path, spec: ParameterSpec, initial: Vector) -> tuple[Vector, int]:
    """Return the model in a file and its version number as `load_model` does; without a file, `initial` and 0."""
    return load_model(path, spec) if os.path.lexists(path) else (initial, 0)


def load_model(path: Path, spec: ParameterSpec) -> tuple[Vector, int]:
    """Read a model and its version number; the number is 0 for a file from another tool.

    Raises `StorageError` if the file is not readable, `ModelMismatchError` if its arrays are not the spec's.
    """
    saved = read_model(path)
    try:
        vector = spec.flatten(saved.arrays)
    except ModelMismatchError as error:
        raise ModelMismatchError(
            f"{path} holds another model than the settings describe: {error}; choose another run folder"
        ) from error
    if not np.isfinite(vector).all():
        raise StorageError(f"{path} has values that are not finite: training diverged; move it away")
    return vector, saved.version
