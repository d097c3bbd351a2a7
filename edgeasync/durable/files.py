"""Replace files atomically, lock folders, and restrict access to their owner.

A file is written next to the existing file, synced and renamed. So after a power cut, either the
old or the new file is complete. Links are never followed, because another user of the machine may
have created a link at the path.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from edgeasync.errors import ConfigError, StorageError
from edgeasync.file_lock import FILE_MODE, FileLock, find_holders
from edgeasync.protocol.wire import Buffer

FOLDER_MODE = 0o700
"""Mode of all folders. Only the owner may read them, because run folders name participants and
state folders prove a device's identity.
"""

_OTHERS = 0o077

LOOKS_MAX, LOOK_S = 10, 0.01
"""Number of attempts to lock a folder, and the delay between them.

A failed attempt may be caused by a process that only checks whether the folder is locked.
"""


def make_folder(path: Path) -> None:
    """Create a folder that only its owner can access, regardless of the umask; raises `OSError`."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(FOLDER_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        with contextlib.suppress(OSError):  # the file system may not support modes
            path.chmod(FOLDER_MODE)


def create_file(path: Path, *, private: bool = True) -> int:
    """Create a file for appending, replacing any file of that name; return its descriptor.

    If `private`, only the owner may read the file, regardless of the umask. Raises `OSError` if the
    file cannot be created, or if the path is a link.
    """
    try:
        descriptor = _create(path, private=private)
    except FileExistsError:  # left by a crash
        refuse_link(path)
        path.unlink()
        descriptor = _create(path, private=private)
    if private:
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, FILE_MODE)
    return descriptor


def _create(path: Path, *, private: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
    return os.open(path, flags, FILE_MODE if private else 0o666)


def refuse_link(path: Path) -> None:
    """Raise `OSError` if a path is a link. Another user could redirect the write with a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a link that edgeasync did not create; remove it")


def narrow(folder: Path) -> list[str]:
    """Remove other users' access to a folder and its files; return a warning if they had access.

    A folder that all users share, such as /tmp, is not changed. If the modes cannot be changed, the
    warning contains the reason.
    """
    folder = folder.resolve()
    narrowed, trouble = False, ""
    try:
        if folder.stat().st_mode & stat.S_ISVTX:
            return [f"{folder}: all users share this folder and can read its files; choose a private folder"]
        # Narrow the folder first, so that nobody else can replace a file in it afterwards.
        paths = [folder, *[Path(e.path) for e in os.scandir(folder) if e.is_file(follow_symlinks=False)]]
        for path in paths:
            narrowed = _narrow(path) or narrowed
    except OSError as error:
        trouble = error.strerror or str(error)
    if trouble:
        return [
            f"{folder}: other users may read it, and its mode cannot be changed ({trouble}); choose another folder"
        ]
    return [f"{folder}: other users could read it or its files; now only its owner can"] if narrowed else []


def _narrow(path: Path) -> bool:
    """Remove other users' access to a file or folder; return whether they had access."""
    if not path.lstat().st_mode & _OTHERS:
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fchmod(descriptor, os.fstat(descriptor).st_mode & 0o700)
        if os.fstat(descriptor).st_mode & _OTHERS:
            raise OSError(errno.ENOTSUP, "the file system does not support modes")
    finally:
        os.close(descriptor)
    return True


def replace_file(path: Path, *content: Buffer, private: bool = True) -> None:
    """Write the parts of `content` to `path` atomically; raises `StorageError`.

    If `private`, only the owner may read the file and, if this call creates it, the folder.
    """
    temporary = path.with_name(path.name + ".part")
    made = False
    try:
        if private:
            make_folder(path.parent)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        with open(create_file(temporary, private=private), "wb") as file:
            made = True
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                temporary.unlink()
        cure = "" if error.errno == errno.ELOOP else "; free disk space or check its permissions"
        raise StorageError(f"{path}: cannot be written: {error.strerror}{cure}") from error


def protect(descriptor: int) -> None:
    """Make a file read-only, so that no program overwrites it in place while it is mapped.

    A process that reads a mapped page beyond the end of the file is ended by SIGBUS. Replacing or
    deleting the file is harmless. Does nothing if the file system does not support modes, or if
    another user owns the file.
    """
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, 0o400)


def check_out(name: str, out: Path, *read: Path, run: Path | None = None) -> None:
    """Raise `ConfigError` if `out` must not be overwritten.

    This is the case if it is a folder, an input file, or inside the `run` folder that is read.
    Inputs may be the only copy of their data. `name` is the name of the argument for the error
    message.
    """
    if out.is_dir():
        raise ConfigError(f"{name} {out}: is a folder; choose a file name")
    place = Path(os.path.realpath(out))
    if run is not None and place.is_relative_to(os.path.realpath(run)):
        raise ConfigError(f"{name} {out}: is inside the input folder {run}; choose a path outside it")
    if str(place) in map(os.path.realpath, read):
        raise ConfigError(f"{name} {out}: is also an input file and would be overwritten; choose another name")


def sync_folder(path: Path) -> None:
    """Sync a folder, which makes the names of its files durable; raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked a folder. The check briefly acquires a shared lock."""
    try:
        lock = FileLock(folder / "lock", os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO would block
    except OSError:
        return False
    try:
        lock.take(fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        lock.close()
    return False


class FolderLock:
    """A folder that only one process at a time may use. It is created if it is missing.

    In error messages, `flag` is the command-line flag that selects another folder. Locking removes
    other users' access to the folder and its files. `remarks` contains warnings about such access.
    """

    def __init__(self, path: Path, flag: str) -> None:
        self.path = path
        self.remarks: list[str] = []
        self._flag = flag
        self._lock: FileLock | None = None

    def take(self, taken: str) -> None:
        """Lock the folder. If it is already locked, raise `StorageError` with the message `taken`."""
        try:
            make_folder(self.path)
            refuse_link(self.path / "lock")
            self._lock = lock = FileLock(self.path / "lock", os.O_RDWR | os.O_CREAT)
            with contextlib.suppress(OSError):
                os.fchmod(lock.descriptor, FILE_MODE)
            _take(lock)
        except BlockingIOError:
            self.close()
            raise StorageError(f"{self.path}: {_why_taken(self.path / 'lock', taken)}") from None
        except OSError as error:
            self.close()
            cure = "" if error.errno == errno.ELOOP else f"; choose another folder for {self._flag}"
            raise StorageError(f"{self.path}: cannot be used: {error.strerror}{cure}") from error
        self.remarks = narrow(self.path)

    def check(self) -> None:
        """Raise `FileNotFoundError` if the folder was moved or removed."""
        assert self._lock is not None
        try:
            same = os.path.samestat(os.fstat(self._lock.descriptor), (self.path / "lock").stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise FileNotFoundError(errno.ENOENT, "the folder was moved or removed")

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()


def _take(lock: FileLock) -> None:
    """Lock a file. Retry briefly, because another process may hold a lock only to check it."""
    for look in range(LOOKS_MAX):
        try:
            lock.take(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if look == LOOKS_MAX - 1:
                raise
            time.sleep(LOOK_S)
        else:
            return


def _why_taken(path: Path, taken: str) -> str:
    """Return the error message for a lock that is taken.

    It begins with `taken`, unless the process that locked the folder has ended. Then it names the
    processes that still hold the lock.
    """
    holders = find_holders(path)
    if os.getpid() in holders.processes:
        return f"{taken}, or stop the other one first: it runs in this process"
    if not holders.processes or holders.owner in holders.processes:
        return taken
    names = " and ".join(f"process {process} ({name})" for process, name in holders.processes.items())
    return f"{names} still holds the lock of a process that has ended; stop it, or choose another folder"
