"""Store a device's local parameters in its state folder."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeasync.durable.kept_arrays import KeptArrays
from edgeasync.errors import ProtocolError

LOCAL_FILE = "local.safetensors"
LOCAL_FORMAT = "edgeasync-local-1"
"""A file of another format is renamed and not read."""

Arrays = dict[str, npt.NDArray[np.float32]]


class LocalFile:
    """`local.safetensors`: named float32 arrays, replaced as a whole once per exchange."""

    def __init__(self, folder: Path, state_id: str) -> None:
        self._kept = KeptArrays(folder / LOCAL_FILE, LOCAL_FORMAT, state_id)

    def read(self) -> Arrays:
        """Return the stored arrays, none if the file is missing.

        Raises `StorageError` if it cannot be read, `ProtocolError` if it is damaged or another
        device's.
        """
        found = self._kept.read()
        arrays: Arrays = {} if found is None else found[1]
        if wrong := [name for name, array in arrays.items() if array.dtype != np.float32]:
            raise ProtocolError(f"written by another version of edgeasync (array {wrong[0]!r} is not float32)")
        return arrays

    def write(self, arrays: Arrays) -> None:
        """Replace the stored arrays, synced to disk; raises `StorageError`."""
        self._kept.write({}, dict(arrays))

    def put_aside(self) -> Path:
        """Rename the file for inspection; return its new path. Raises `StorageError`."""
        return self._kept.put_aside()
