"""Reads and writes a run's model as a safetensors file. Not imported on devices."""

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
    """A saved model: named arrays, lineage, version, evaluation, and the time it was saved."""

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
    """Write a model's named arrays and metadata to a safetensors file.

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
    """Raise `StorageError` if `diverged` is true or a value of the model is not finite."""
    if diverged or not np.isfinite(vector).all():
        raise StorageError(f"{path}: not written, because {DIVERGED}")


def read_model(path: Path) -> SavedModel:
    """Read a model that `save_model` or another program wrote. Raises `StorageError`."""
    return _read(path, arrays=True)


def read_header(path: Path) -> SavedModel:
    """Read the metadata of a model without its arrays. Raises `StorageError`."""
    return _read(path, arrays=False)


def _read(path: Path, *, arrays: bool) -> SavedModel:
    try:
        check_regular(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            found = {name: file.get_tensor(name) for name in (file.keys() if arrays else ())}
            metadata = file.metadata() or {}
        if metadata.get("format") != "edgeasync":
            metadata = {}  # the metadata of other programs has other meanings
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
        raise StorageError(f"{path}: no such file; pass the folder of a run that has saved its model") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}; move the file away") from error
    except (MemoryError, ValueError, OverflowError, safetensors.SafetensorError) as error:
        raise StorageError(f"{path}: not a readable safetensors file ({error}); move the file away") from error
    return SavedModel(found, metadata.get("lineage", ""), version, evaluation, saved_s)


def load_kept(path: Path, spec: ParameterSpec, initial: Vector) -> tuple[Vector, int]:
    """Return the model and version in a file, or `initial` and 0 if the file does not exist."""
    return load_model(path, spec) if os.path.lexists(path) else (initial, 0)


def load_model(path: Path, spec: ParameterSpec) -> tuple[Vector, int]:
    """Read a model and its version number. The version is 0 if another program wrote the file.

    Raises `StorageError` if the file cannot be read, and `ModelMismatchError` if its arrays do not
    match the spec.
    """
    saved = read_model(path)
    try:
        vector = spec.flatten(saved.arrays)
    except ModelMismatchError as error:
        raise ModelMismatchError(
            f"{path} contains a different model from the one in the settings: {error}; choose another run folder"
        ) from error
    if not np.isfinite(vector).all():
        raise StorageError(f"{path} contains values that are not finite: training diverged; move the file away")
    return vector, saved.version
