"""Files that are replaced as a whole, folders that one process uses, and a device's identity in one.

A file is written beside the old one, synced, and renamed: a power cut leaves the old one or the new one, never
a torn one.
"""

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.errors import StorageError


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
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(f"{path}: cannot be written: {error.strerror}; free space or fix its rights") from error


class DeviceIdentity(msgspec.Struct, frozen=True):
    """What a device keeps between starts: a random state id, and how often it was started."""

    device_id: str
    state_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    start: Annotated[int, Meta(ge=1)]


class FolderLock:
    """A folder that one process at a time may use, made if it is missing; `flag` is what chooses another."""

    def __init__(self, path: Path, flag: str) -> None:
        self.path = path
        self._flag = flag
        self._file = -1

    def take(self, taken: str) -> None:
        """Lock the folder; raises `StorageError`, with the sentence `taken` if another process has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StorageError(f"{self.path}: {taken}") from None
        except OSError as error:
            self.close()
            raise StorageError(
                f"{self.path}: cannot be used: {error.strerror}; choose another {self._flag} folder"
            ) from error

    def close(self) -> None:
        """Let another process have the folder."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class DeviceFolder:
    """A device's state folder, held by at most one running agent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FolderLock(path, "--state")

    def open(self, device_id: str) -> DeviceIdentity:
        """Lock the folder and return the identity of this start, already on disk.

        Raises `StorageError` if another agent holds the folder, or if it is not readable.
        """
        file = self._path / "identity.json"
        self._lock.take(f"another agent runs as {device_id!r} here; give this one another --device-id")
        try:
            identity = _next_start(file, device_id)
            replace_file(file, msgspec.json.encode(identity))
        except BaseException:
            self.close()
            raise
        return identity

    def close(self) -> None:
        """Let another agent have the folder."""
        self._lock.close()


def _next_start(file: Path, device_id: str) -> DeviceIdentity:
    """Return the identity of the start after the one on disk, or a new one for another device."""
    try:
        known = msgspec.json.decode(file.read_bytes(), type=DeviceIdentity) if file.exists() else None
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {error.strerror}; fix its rights") from error
    except msgspec.DecodeError as error:
        raise StorageError(f"{file}: damaged ({error}); delete it to begin anew") from error
    if known is None or known.device_id != device_id:
        return DeviceIdentity(device_id, secrets.token_hex(16), 1)
    return msgspec.structs.replace(known, start=known.start + 1)
