"""Store named arrays of a device in a file that contains a format, a checksum and the state id."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from edgeasync.durable.files import replace_file
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.protocol import wire
from edgeasync.regular_file import check_regular

Arrays = dict[str, npt.NDArray[Any]]


class KeptArrays:
    """A file of arrays and strings in a device's state folder. It contains the device's state id."""

    def __init__(self, path: Path, made: str, state_id: str) -> None:
        self.path = path
        self._format = made
        self._state_id = state_id

    def read(self) -> tuple[dict[str, str], Arrays] | None:
        """Read and verify the strings and arrays; return `None` if the file is missing.

        Raises `StorageError` if the file cannot be read. Raises `ProtocolError` if it is damaged or
        belongs to another device.
        """
        path = self.path
        try:
            check_regular(path)
            with safetensors.safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be read: {error.strerror or error}; check its permissions, or delete it"
            ) from error
        except (MemoryError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
            raise ProtocolError(f"damaged ({error})") from error
        if metadata.get("format") != self._format:
            raise ProtocolError("written by another version of edgeasync")
        checksum = metadata.pop("checksum", "")
        if checksum != _checksum(metadata, arrays):
            raise ProtocolError("damaged (wrong checksum)")
        if metadata.get("state_id") != self._state_id:
            raise ProtocolError("written by another device")
        return metadata, arrays

    def write(self, metadata: dict[str, str], arrays: Arrays) -> None:
        """Replace the content of the file and sync it to disk; raises `StorageError`."""
        metadata = {"format": self._format, **metadata, "state_id": self._state_id}
        metadata["checksum"] = _checksum(metadata, arrays)
        replace_file(self.path, safetensors.numpy.save(arrays, metadata))

    def put_aside(self) -> Path:
        """Rename the file so that it can be inspected; return its new path.

        A file that was renamed earlier is replaced. Raises `StorageError`.
        """
        aside = self.path.with_name(self.path.name + ".damaged")
        try:
            self.path.replace(aside)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be renamed: {error.strerror or error}; delete it") from error
        return aside


def _checksum(metadata: dict[str, str], arrays: Arrays) -> str:
    """Return the XXH3 of the sorted strings and arrays, without the checksum itself."""
    parts: list[wire.Buffer] = [msgspec.json.encode(sorted(metadata.items()))]
    for name, array in sorted(arrays.items()):
        parts += [f"{name} {array.dtype} {array.shape}".encode(), np.ascontiguousarray(array).data.cast("B")]
    return f"{wire.checksum(*parts):016x}"
