"""The two files the runtime keeps: a run's model (safetensors) and a device's identity (JSON).

Both are replaced as a whole (temporary file, fsync, rename, fsync of the folder): a power cut leaves the old
file or the new one, never a torn one.
"""

import fcntl
import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from msgspec import Meta

from edgeasync.errors import ModelMismatchError, StorageError
from edgeasync.parameters import ParameterSpec, Vector

MODEL_FILE = "model.safetensors"


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically; raises `StorageError`."""
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}; free space or fix its rights") from error


def save_model(path: Path, spec: ParameterSpec, vector: Vector, *, lineage: str, version: int) -> None:
    """Write the model's named arrays to a safetensors file; raises `StorageError`."""
    metadata = {"format": "edgeasync", "lineage": lineage, "version": str(version)}
    replace_file(path, safetensors.numpy.save(dict(spec.views(vector)), metadata))


def load_model(path: Path, spec: ParameterSpec) -> tuple[Vector, int]:
    """Read a model and its version number (0 for a file of another maker).

    Raises `StorageError` if the file is not readable, `ModelMismatchError` if its arrays are not the spec's.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        version = int(metadata.get("version", "0"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise StorageError(f"{path}: not a readable safetensors file ({error}); move it away") from error
    try:
        vector = spec.flatten(arrays)
    except ModelMismatchError as error:
        raise ModelMismatchError(
            f"{path} holds another model than the settings describe: {error}; choose another run folder"
        ) from error
    if not np.isfinite(vector).all():
        raise StorageError(f"{path} has values that are not finite: training diverged; move it away")
    return vector, max(0, version)


class DeviceIdentity(msgspec.Struct, frozen=True):
    """What a device keeps between starts: a random state id, and how often it was started."""

    device_id: str
    state_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    start: Annotated[int, Meta(ge=1)]


class DeviceFolder:
    """A device's state folder, held by at most one running agent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def open(self, device_id: str) -> DeviceIdentity:
        """Lock the folder and return the identity of this start, already on disk.

        Raises `StorageError` if another agent holds the folder, or if it is not readable.
        """
        file = self.path / "identity.json"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            identity = _next_start(file, device_id)
            replace_file(file, msgspec.json.encode(identity))
        except BlockingIOError:
            self.close()
            raise StorageError(
                f"{self.path}: another agent runs as {device_id!r} here; give this one another --device-id"
            ) from None
        except OSError as error:
            self.close()
            raise StorageError(f"{self.path}: cannot be used: {error.strerror}; choose another --state") from error
        except StorageError:
            self.close()
            raise
        return identity

    def close(self) -> None:
        """Let another agent have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _next_start(file: Path, device_id: str) -> DeviceIdentity:
    """Return the identity of the start after the one on disk, or a new one for another device."""
    try:
        known = msgspec.json.decode(file.read_bytes(), type=DeviceIdentity) if file.exists() else None
    except msgspec.DecodeError as error:
        raise StorageError(f"{file}: damaged ({error}); delete it to begin anew") from error
    if known is None or known.device_id != device_id:
        return DeviceIdentity(device_id, secrets.token_hex(16), 1)
    return msgspec.structs.replace(known, start=known.start + 1)
