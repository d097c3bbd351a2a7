"""A disk in memory that fails at a chosen operation, and that can lose what was not synced."""

import errno
import os
from collections.abc import Sequence

from edgeasync.protocol.wire import Buffer


class _Content:
    def __init__(self) -> None:
        self.live = bytearray()
        self.synced = b""


class FailingDisk:
    """Counts its operations; raises at number `fail_at`, and at all later ones if `for_good`."""

    def __init__(self) -> None:
        self.files: dict[str, _Content] = {}
        self.synced_names: dict[str, _Content] = {}
        self.operations = 0
        self.fail_at: int | None = None
        self.for_good = False

    def fail(self, operations: int, *, for_good: bool = False) -> None:
        """Raise at the operation after `operations` more of them."""
        self.fail_at, self.for_good = self.operations + operations, for_good

    def step(self) -> None:
        now, self.operations = self.operations, self.operations + 1
        if self.fail_at is not None and (now == self.fail_at or (self.for_good and now > self.fail_at)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def after_crash(
        self, *, power_cut: bool, torn: int = 0, zeroed: bool = False, names_kept: str | None = None
    ) -> "FailingDisk":
        """Return what the next process finds: all of it, or after a power cut what was synced and chance left.

        Of bytes that were not synced the first `torn` are there, as zeros if `zeroed`; changes to names that were
        not synced are undone but for those that end with `names_kept`.
        """
        found = FailingDisk()
        for name in self.files.keys() | self.synced_names.keys():
            kept = not power_cut or (names_kept is not None and name.endswith(names_kept))
            content = (self.files if kept else self.synced_names).get(name)
            if content is None:
                continue
            copy = _Content()
            unsynced = bytes(content.live[len(content.synced) :])[:torn]
            unsynced = bytes(len(unsynced)) if zeroed else unsynced
            copy.live[:] = content.synced + unsynced if power_cut else content.live
            copy.synced = bytes(copy.live)
            found.files[name] = found.synced_names[name] = copy
        return found

    def names(self) -> list[str]:
        self.step()
        return sorted(self.files)

    def size(self, name: str) -> int:
        self.step()
        return len(self._content(name).live)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        self.step()
        return bytes(self._content(name).live[offset : None if nbytes is None else offset + nbytes])

    def create(self, name: str, *, padded: bool = False) -> "_OpenFile":
        self.step()
        self.files[name] = _Content()
        return _OpenFile(self, self.files[name])

    def reopen(self, name: str) -> "_OpenFile":
        self.step()
        return _OpenFile(self, self._content(name))

    def truncate(self, name: str, nbytes: int) -> None:
        self.step()
        content = self._content(name)
        del content.live[nbytes:]
        content.synced = bytes(content.live)

    def rename(self, source: str, target: str) -> None:
        self.step()
        self.files[target] = self._content(source)
        del self.files[source]

    def remove(self, name: str) -> None:
        self.step()
        self._content(name)
        del self.files[name]

    def sync_folder(self) -> None:
        self.step()
        self.synced_names = dict(self.files)

    def _content(self, name: str) -> _Content:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self.files[name]


class _OpenFile:
    def __init__(self, disk: FailingDisk, content: _Content) -> None:
        self._disk = disk
        self._content = content
        self._closed = False

    def write(self, parts: Sequence[Buffer]) -> None:
        assert not self._closed
        content = b"".join(bytes(part) for part in parts)
        try:
            self._disk.step()
        except OSError:
            self._content.live += content[: len(content) // 2]
            raise
        self._content.live += content

    def sync(self) -> None:
        assert not self._closed
        self._disk.step()
        self._content.synced = bytes(self._content.live)

    def close(self) -> None:
        self._closed = True
