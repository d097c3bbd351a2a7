"""Files that are replaced as a whole, folders that one process uses, and who may read them: their owner alone.

A file is written beside the old one, synced, and renamed: a power cut leaves the old one or the new one, never
a torn one. Another user of the machine may have put a link where that file goes; it is never followed.
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
"""Of everything that is kept: a run tells who takes part, and a device's state that it is that device."""

_OTHERS = 0o077

LOOKS_MAX, LOOK_S = 10, 0.01
"""How often a lock is tried, and how long to wait in between: somebody may only look whether it is taken."""


def make_folder(path: Path) -> None:
    """Make a folder for its owner alone, whatever the umask, unless there is one; raises `OSError`."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(FOLDER_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        with contextlib.suppress(OSError):  # a file system without modes
            path.chmod(FOLDER_MODE)


def create_file(path: Path, *, private: bool = True) -> int:
    """Return the descriptor of a new file to append to, in place of one of that name.

    Only its owner may read a `private` one, whatever the umask. Raises `OSError`, and so for a link in its place.
    """
    try:
        descriptor = _create(path, private=private)
    except FileExistsError:  # a crash has left it
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
    """Raise `OSError` if a path is a link: another user may have made it, to have another file overwritten."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path} is a link that nothing here has made; remove it")


def narrow(folder: Path) -> list[str]:
    """Take from others what they may do with a folder and its files; return a sentence if they could do anything.

    A folder that all users share, as /tmp, is left as it is. Where modes cannot be changed, the sentence says so.
    """
    folder = folder.resolve()
    narrowed, trouble = False, ""
    try:
        if folder.stat().st_mode & stat.S_ISVTX:
            return [f"{folder}: is shared with others, who can see what is kept there; choose a folder of its own"]
        # The folder first: then nobody can put another file in the place of one.
        paths = [folder, *[Path(e.path) for e in os.scandir(folder) if e.is_file(follow_symlinks=False)]]
        for path in paths:
            narrowed = _narrow(path) or narrowed
    except OSError as error:
        trouble = error.strerror or str(error)
    if trouble:
        return [
            f"{folder}: others may read it, and that cannot be changed ({trouble}); keep it where they cannot go"
        ]
    return [f"{folder}: others could read it or its files; from now on only its owner can"] if narrowed else []


def _narrow(path: Path) -> bool:
    """Take from others what they may do with a file or folder; return whether that was anything."""
    if not path.lstat().st_mode & _OTHERS:
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fchmod(descriptor, os.fstat(descriptor).st_mode & 0o700)
        if os.fstat(descriptor).st_mode & _OTHERS:
            raise OSError(errno.ENOTSUP, "the file system has no modes")
    finally:
        os.close(descriptor)
    return True


def replace_file(path: Path, *content: Buffer, private: bool = True) -> None:
    """Write the parts of `content` to `path` atomically; raises `StorageError`.

    With `private` only its owner may read it, and the folder if that has to be made.
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
        cure = "" if error.errno == errno.ELOOP else "; free space or fix its rights"
        raise StorageError(f"{path}: cannot be written: {error.strerror}{cure}") from error


def check_out(name: str, out: Path, *read: Path, run: Path | None = None) -> None:
    """Raise `ConfigError` if `out`, given as `name`, is a folder, is read itself, or lies in a `run` that is read.

    There may be no other copy of what is read.
    """
    if out.is_dir():
        raise ConfigError(f"{name} {out}: is a folder; give the name of a file")
    place = Path(os.path.realpath(out))
    if run is not None and place.is_relative_to(os.path.realpath(run)):
        raise ConfigError(f"{name} {out}: {run} is a folder that is read; give a place outside it")
    if str(place) in map(os.path.realpath, read):
        raise ConfigError(f"{name} {out}: is read here: its old content would be lost; give another name")


def sync_folder(path: Path) -> None:
    """Sync a folder itself: the names of the files in it; raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a process holds a folder's lock. To see that it is shared for a moment, and given back."""
    try:
        lock = FileLock(folder / "lock", os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait
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
    """A folder that one process at a time may use, made if it is missing; `flag` is what chooses another.

    Only its owner may use it, and the files in it: `remarks` has sentences for a person about what was otherwise.
    """

    def __init__(self, path: Path, flag: str) -> None:
        self.path = path
        self.remarks: list[str] = []
        self._flag = flag
        self._lock: FileLock | None = None

    def take(self, taken: str) -> None:
        """Lock the folder; raises `StorageError`, with the sentence `taken` if another process has it."""
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
            cure = "" if error.errno == errno.ELOOP else f"; choose another {self._flag} folder"
            raise StorageError(f"{self.path}: cannot be used: {error.strerror}{cure}") from error
        self.remarks = narrow(self.path)

    def check(self) -> None:
        """Raise `FileNotFoundError` if the folder was moved or removed: nobody would find what is written."""
        assert self._lock is not None
        try:
            same = os.path.samestat(os.fstat(self._lock.descriptor), (self.path / "lock").stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise FileNotFoundError(errno.ENOENT, "the folder was moved or removed")

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            self._lock.close()


def _take(lock: FileLock) -> None:
    """Lock a file; wait a little, for somebody may only look whether it is locked (`is_locked`)."""
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
    """Return the sentence `taken`; or who holds the lock if its owner has ended."""
    holders = find_holders(path)
    if os.getpid() in holders.processes:
        return f"{taken}, or stop it first: it belongs to this process"
    if not holders.processes or holders.owner in holders.processes:
        return taken
    names = " and ".join(f"process {process} ({name})" for process, name in holders.processes.items())
    return f"{names} still holds the lock, though its owner has ended; end it, or choose another folder"
