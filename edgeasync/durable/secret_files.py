"""Files and folders for keys and tokens that only their owner may read or write.

A secret is always written to a new file, never through a link, and read only from a regular file. A
file that other users can read is refused, because they may already know the secret.
"""

import contextlib
import errno
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
_NOT_A_FILE = "{}: a folder, a link or a device, not a regular file; replace it"


def private_folder(path: Path) -> Path:
    """Create a folder that only its owner may access, and its parent if missing; return the folder.

    Raises `StorageError` if the folder cannot be created, is a link, or is accessible to other
    users.
    """
    try:
        path.parent.mkdir(_PRIVATE, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(_PRIVATE)
    except OSError as error:
        raise StorageError(f"{path}: cannot be created: {error.strerror}; choose another folder") from error
    check_private(path)
    return path


HUB_KEYS = "create a hub's keys with 'edgeasync keys init', or set the right folder (--keys)"


def check_private(path: Path) -> None:
    """Raise `StorageError` unless a path is a folder that only its owner may access."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise StorageError(f"{path}: no such folder; {HUB_KEYS}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}; choose another folder") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{path}: is a link or a file; choose a folder")
    _check_owner(path, found, remedy=f"run chmod 700 {path}")


def read_secret(
    path: Path, *, public: bool = False, absent: str = HUB_KEYS, known: str = "create new keys"
) -> bytes:
    """Return the content of a secret file.

    If the file is `public`, other users may read it, but not write it. Raises `StorageError` if the
    file cannot be read, is a link, or is accessible to other users. `absent` tells the user what to
    do if the file is missing, and `known` if others may know the secret.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a path would follow links
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StorageError(_NOT_A_FILE.format(path))
            remedy = f"{known}, or run chmod 600 {path} if nobody has read it"
            _check_owner(path, found, remedy=remedy, forbidden=0o022 if public else 0o077)
            return file.read()
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file; {absent}") from None
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            raise StorageError(_NOT_A_FILE.format(path)) from None
        raise StorageError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    except MemoryError:
        raise StorageError(
            f"{path}: not a file of keys, because it is too large for this machine's memory; replace it"
        ) from None


def write_secret(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a secret to a file and sync it.

    Unless `replace` is true, an existing file is not changed, and `StorageError` is raised.
    """
    with staged_secret(path, content, replace=replace):
        pass


@contextlib.contextmanager
def staged_secret(path: Path, content: bytes, *, replace: bool = False) -> Iterator[None]:
    """Like `write_secret`, but the file gets its name only if the `with` block succeeds."""
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
        remedy = (
            "it was not changed"
            if isinstance(error, FileExistsError)
            else "free disk space or check its permissions"
        )
        raise StorageError(f"{path}: cannot be written: {error.strerror}; {remedy}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder of secrets, so that only one process at a time changes its content."""
    try:
        lock = FileLock(folder / "lock", os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        raise StorageError(f"{folder}: no such folder; {HUB_KEYS}") from None
    except OSError as error:
        raise StorageError(f"{folder}: cannot be locked: {error.strerror}; check its permissions") from error
    try:
        lock.take(fcntl.LOCK_EX)
        yield
    finally:
        lock.close()


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, _SECRET)


def _check_owner(path: Path, found: os.stat_result, *, remedy: str, forbidden: int = 0o077) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise StorageError(f"{path}: belongs to another user; use a file or folder of your own")
    if found.st_mode & forbidden:
        what = "changed" if forbidden == 0o022 else "read"
        raise StorageError(f"{path}: other users may have {what} it (mode {found.st_mode & 0o777:o}); {remedy}")
