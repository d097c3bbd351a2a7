"""Store a device's local parameters in its state folder."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeasync.durable.kept_arrays import KeptArrays
from edgeasync.errors import ProtocolError

LOCAL_FILE = "local.safetensors"
LOCAL_FORMAT = "edgeasync-local-1"
"""The supported format. A file in another format is renamed and not read."""

Arrays = dict[str, npt.NDArray[np.float32]]


class LocalFile:
    """The file `local.safetensors`, which contains named float32 arrays.

    The whole file is replaced after each exchange.
    """

    def __init__(self, folder: Path, state_id: str) -> None:
        self._kept = KeptArrays(folder / LOCAL_FILE, LOCAL_FORMAT, state_id)

    def read(self) -> Arrays:
        """Return the stored arrays. If the file is missing, there are no arrays.

        Raises `StorageError` if the file cannot be read. Raises `ProtocolError` if it is damaged or
        belongs to another device.
        """
        found = self._kept.read()
        arrays: Arrays = {} if found is None else found[1]
        if wrong := [name for name, array in arrays.items() if array.dtype != np.float32]:
            raise ProtocolError(f"written by another version of edgeasync (array {wrong[0]!r} is not float32)")
        return arrays

    def write(self, arrays: Arrays) -> None:
        """Replace the stored arrays and sync them to disk; raises `StorageError`."""
        self._kept.write({}, dict(arrays))

    def put_aside(self) -> Path:
        """Rename the file so that it can be inspected; return its new path. Raises `StorageError`."""
        return self._kept.put_aside()
