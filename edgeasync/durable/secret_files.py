"""Files that nobody but their owner may read or write: keys, tokens, and the folders they lie in.

A secret is written to a new file that is never opened through a link, and read from a plain file alone. What
others can read is refused: a secret that somebody may have seen is none.
"""

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from edgeasync.durable.files import sync_folder
from edgeasync.errors import StorageError
from edgeasync.file_lock import FileLock

_SECRET = 0o600
_PRIVATE = 0o700


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter, if it is missing, as the one above it; return it.

    Raises `StorageError` if it cannot be made, is a link, or is open to others.
    """
    try:
        path.parent.mkdir(_PRIVATE, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(_PRIVATE)
    except OSError as error:
        raise StorageError(f"{path}: cannot be made: {error.strerror}; choose another folder") from error
    check_private(path)
    return path


HUB_KEYS = "make a hub's keys with 'edgeasync keys init', or give the right folder (--keys)"


def check_private(path: Path) -> None:
    """Raise `StorageError` unless a path is a folder that only its owner may enter."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise StorageError(f"{path}: no such folder; {HUB_KEYS}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}; choose another folder") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{path}: is a link or a file; give a folder of its own")
    _check_owner(path, found, remedy=f"chmod 700 {path}")


def read_secret(path: Path, *, public: bool = False, absent: str = HUB_KEYS) -> bytes:
    """Return what a secret file holds; one that is `public` others may read, but not write.

    Raises `StorageError` if it cannot be read, is a link, or is open to others. `absent` is what to do if there is
    no such file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a path would follow links
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StorageError(f"{path}: is no plain file")
            remedy = f"chmod 600 {path}, or better make new keys"
            _check_owner(path, found, remedy=remedy, forbidden=0o022 if public else 0o077)
            return file.read()
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file; {absent}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except MemoryError:
        raise StorageError(f"{path}: cannot be read: Longer than this machine's memory") from None


def write_secret(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a secret to a file of its own, synced.

    With `replace` it takes the place of the one that is there; without, that is left alone. Raises `StorageError`.
    """
    with staged_secret(path, content, replace=replace):
        pass


@contextlib.contextmanager
def staged_secret(path: Path, content: bytes, *, replace: bool = False) -> Iterator[None]:
    """Write a secret as `write_secret` does, but name the file after the block, unless that raises."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(temporary, "xb", opener=_create) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield
        if replace:
            temporary.replace(path)
        else:
            os.link(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        remedy = "it is left as it is" if isinstance(error, FileExistsError) else "free space or fix its rights"
        raise StorageError(f"{path}: cannot be written: {error.strerror}; {remedy}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of secrets, so that one process at a time changes what is in it."""
    try:
        lock = FileLock(folder / "lock", os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        raise StorageError(f"{folder}: no such folder; {HUB_KEYS}") from None
    except OSError as error:
        raise StorageError(f"{folder}: cannot be locked: {error.strerror}") from error
    try:
        lock.take(fcntl.LOCK_EX)
        yield
    finally:
        lock.close()


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, _SECRET)


def _check_owner(path: Path, found: os.stat_result, *, remedy: str, forbidden: int = 0o077) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise StorageError(f"{path}: belongs to another user")
    if found.st_mode & forbidden:
        what = "changed" if forbidden == 0o022 else "read"
        raise StorageError(f"{path}: other users may have {what} it (mode {found.st_mode & 0o777:o}); {remedy}")
