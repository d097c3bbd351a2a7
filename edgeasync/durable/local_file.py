"""A device's own values of the arrays that it shares with nobody, in its state folder."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeasync.durable.kept_arrays import KeptArrays
from edgeasync.errors import ProtocolError

LOCAL_FILE = "local.safetensors"
LOCAL_FORMAT = "edgeasync-local-1"
"""A file of another format is another software's, and is put aside."""

Arrays = dict[str, npt.NDArray[np.float32]]


class LocalFile:
    """`local.safetensors`: named float32 arrays, replaced as a whole once an exchange."""

    def __init__(self, folder: Path, state_id: str) -> None:
        self._kept = KeptArrays(folder / LOCAL_FILE, LOCAL_FORMAT, state_id)

    def read(self) -> Arrays:
        """Return what was kept; nothing if there is no file.

        Raises `StorageError` if it cannot be read, `ProtocolError` if it is damaged or not this device's.
        """
        found = self._kept.read()
        arrays: Arrays = {} if found is None else found[1]
        if wrong := [name for name, array in arrays.items() if array.dtype != np.float32]:
            raise ProtocolError(f"of another version of this software (array {wrong[0]!r} is not float32)")
        return arrays

    def write(self, arrays: Arrays) -> None:
        """Keep these instead; returns when they would outlive a power cut. Raises `StorageError`."""
        self._kept.write({}, dict(arrays))

    def put_aside(self) -> Path:
        """Rename the file, so that a person may look at it; return its new path. Raises `StorageError`."""
        return self._kept.put_aside()
