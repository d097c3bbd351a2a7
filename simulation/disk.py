"""A disk in memory that does what disks do: it tears writes, forgets what was not synced, fills up and errs."""

import errno
import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal, NamedTuple

from edgeasync.durable.direct_file import BLOCK_BYTES
from edgeasync.durable.disk import File
from edgeasync.protocol.wire import Buffer

SECTOR_BYTES = 512
"""What a disk writes at once: a power cut leaves a sector as it was or as it should be, or neither."""


Operations = Literal["all", "names", "content"]
"""Kinds of what a disk is asked to do: about files' names, or about what is in them."""


class _Content:
    """What a file holds, as the process sees it, and what of that a power cut would leave.

    The first `synced` bytes would be left, but for the `doubtful` ranges: those whose sync has failed. `before` is
    what the file held before it was emptied, if that was not synced.
    """

    __slots__ = ("before", "doubtful", "padded", "seen", "synced")

    def __init__(self) -> None:
        self.seen = bytearray()
        self.synced = 0
        self.doubtful: list[tuple[int, int]] = []
        self.before: _Content | None = None
        self.padded = False

    @property
    def unsynced_bytes(self) -> int:
        """Bytes that were written since the last sync."""
        return len(self.seen) - self.synced

    def sync(self) -> None:
        """Note that all of it would be left."""
        self.synced = len(self.seen)
        self.before = None

    def doubt(self) -> None:
        """Note that a sync has failed: the system takes the pages for written, and nobody knows."""
        if self.unsynced_bytes:
            self.doubtful.append((self.synced, len(self.seen)))
        self.sync()

    def cut(self, nbytes: int) -> None:
        """Keep only the first bytes."""
        del self.seen[nbytes:]
        self.synced = min(self.synced, nbytes)
        self.doubtful = [(start, min(stop, nbytes)) for start, stop in self.doubtful if start < nbytes]

    def empty(self) -> None:
        """Keep nothing; until that is synced, a power cut may bring back what was there."""
        before = _Content()
        before.seen, before.synced, before.doubtful = self.seen, self.synced, self.doubtful
        before.before = self.before
        self.seen, self.synced, self.doubtful, self.before = bytearray(), 0, [], before

    def copy(self) -> "_Content":
        """Return the same once more."""
        copy = _Content()
        copy.seen += self.seen
        copy.synced, copy.doubtful = self.synced, list(self.doubtful)
        copy.before = None if self.before is None else self.before.copy()
        copy.padded = self.padded
        return copy

    def pad(self) -> None:
        """Add the zeros that a file has whose process died before it closed it."""
        if self.padded:
            was_synced, self.padded = not self.unsynced_bytes, False
            self.seen += bytes(-len(self.seen) % BLOCK_BYTES)
            if was_synced:
                self.synced = len(self.seen)

    def after_power_cut(self, random: Random) -> "_Content":
        """Return what is left."""
        if self.before is not None and random.random() < 0.5:
            return self.before.after_power_cut(random)
        left = _Content()
        left.padded = self.padded
        left.seen += self.seen
        for start, stop in self.doubtful:
            if random.random() < 0.5:
                _lose_sectors(left.seen, start, stop, random)
        end = self.synced + random.choice(
            (0, self.unsynced_bytes, self.unsynced_bytes, random.randint(0, self.unsynced_bytes))
        )
        del left.seen[end:]
        if random.random() < 0.75:
            _lose_sectors(left.seen, self.synced, end, random)
        left.synced = len(left.seen)
        return left


def _lose_sectors(content: bytearray, start: int, stop: int, random: Random) -> None:
    """Let sectors that were written between two offsets be zeros or garbage, others whole."""
    garbage, lost = random.random() < 0.5, random.choice((0.2, 0.5))
    for sector in range(start // SECTOR_BYTES, -(-stop // SECTOR_BYTES)):
        low, high = max(start, sector * SECTOR_BYTES), min(stop, (sector + 1) * SECTOR_BYTES)
        if random.random() < lost:
            content[low:high] = random.randbytes(high - low) if garbage else bytes(high - low)


_Change = dict[str, _Content | None]
"""Names that come to mean other contents, all at once; `None` if they are no more."""


class _Death(NamedTuple):
    """When the process on the disk dies."""

    operation: int
    of: Operations
    power: bool
    then: Callable[[], None]


class DiskCopy(NamedTuple):
    """All that is on a `SimulatedDisk` at one moment, synced or not."""

    names: dict[str, _Content]
    synced_names: dict[str, _Content]
    changes: list[_Change]


def _settled(names: dict[str, _Content]) -> DiskCopy:
    return DiskCopy(dict(names), names, [])


class _SimulatedFile:
    """A file of a `SimulatedDisk`, open for writing."""

    def __init__(self, disk: "SimulatedDisk", content: _Content) -> None:
        self._disk = disk
        self._content = content
        self._power_cuts = disk.power_cuts
        self._open = True

    def write(self, parts: Sequence[Buffer]) -> None:
        """Append all parts, or as much of them as the disk takes."""
        self._check()
        self._disk.append(self._content, b"".join(parts))

    def sync(self) -> None:
        """Let the content outlive a power cut."""
        self._check()
        self._disk.sync(self._content)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._open and self._power_cuts == self._disk.power_cuts:
            self._content.padded = False
        self._open = False

    def _check(self) -> None:
        if not self._open or self._power_cuts != self._disk.power_cuts:
            raise _error(errno.EBADF)


class SimulatedDisk:
    """A folder of files in memory, with the faults of real ones; a `Disk`.

    `capacity_bytes` may change at any time, as may `read_only`. `failing_writes` and `failing_syncs` say how many
    of the next ones fail; a failed sync leaves what was written since the last one in doubt for ever.
    """

    def __init__(self, seed: int | str = 0, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.read_only = False
        self.failing_writes = 0
        self.failing_syncs = 0
        self.operations = 0
        """Everything that could change the disk and was asked of it so far; reading is none."""
        self.name_operations = 0
        """Those among them that are about names: of new files, renamed and removed ones, and their syncs."""
        self.power_cuts = 0
        self._random = Random(f"{seed}/disk")
        self._names: dict[str, _Content] = {}
        self._synced_names: dict[str, _Content] = {}
        self._changes: list[_Change] = []
        self._cut: _Death | None = None
        self._left_at_cut: DiskCopy | None = None

    # -- faults ----------------------------------------------------------------------------------------------

    def crash(self, random: Random | None = None) -> None:
        """Cut the power: what was not synced is lost, or torn, or left, in any mixture; open files are closed.

        Of a file's unsynced content any beginning is left, at times with sectors lost in between. Of the changes
        of names that were not synced any are done, in order.
        """
        copy = self._left_at_cut
        self.restore(_settled(self._left(random or self._random)) if copy is None else copy)

    def copy(self) -> "DiskCopy":
        """Return all that is on the disk, synced or not: a backup, taken at one moment."""
        return self._copy()

    def _copy(self) -> "DiskCopy":
        contents = {id(content): content for content in self._all_contents()}
        copies = {key: content.copy() for key, content in contents.items()}

        def copied(names: dict[str, _Content]) -> dict[str, _Content]:
            return {name: copies[id(content)] for name, content in names.items()}

        changes = [
            {name: None if content is None else copies[id(content)] for name, content in change.items()}
            for change in self._changes
        ]
        return DiskCopy(copied(self._names), copied(self._synced_names), changes)

    def restore(self, copy: "DiskCopy") -> None:
        """Put a copy back, which is the disk's from then on; open files are closed, and nobody is dead."""
        self._names, self._synced_names, self._changes = copy.names, copy.synced_names, copy.changes
        for content in self._all_contents():
            content.pad()
        self._cut = self._left_at_cut = None
        self.power_cuts += 1

    def replace(self) -> None:
        """Put an empty disk in the place of this one."""
        self.restore(DiskCopy({}, {}, []))

    def count(self, of: Operations = "all") -> int:
        """Return how many operations of a kind there were so far."""
        counts = {"all": self.operations, "names": self.name_operations}
        return counts.get(of, self.operations - self.name_operations)

    def die_at(self, operation: int, then: Callable[[], None], of: Operations = "all", *, power: bool) -> None:
        """Let the process die in the middle of the disk's `operation`-th operation, counted from the first.

        Only operations `of` a kind are counted; see `count`. With `power` the power fails. Without, what the
        process had written is left, synced or not, and any beginning of what it was writing.

        The process does not know: to it the disk works on, but what is left once `crash` is called was settled at
        that operation. `then` must see to it that `crash` is called, and that nothing the process still does gets
        out.
        """
        self._cut = _Death(operation, of, power, then)

    @property
    def powerless(self) -> bool:
        """Whether a process that still believes to work is dead, by `die_at`."""
        return self._left_at_cut is not None

    def heal(self) -> None:
        """End all faults that are not done yet."""
        self.capacity_bytes = None
        self.read_only = False
        self.failing_writes = self.failing_syncs = 0
        self._cut = None

    @property
    def used_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(content.seen) for content in self._names.values())

    # -- what a `Disk` does ----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all files, in order."""
        return sorted(self._names)

    def size(self, name: str) -> int:
        """Return how many bytes a file has."""
        return len(self._find(name).seen)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> Buffer:
        """Return a file's content, or a part of it."""
        return bytes(self._find(name).seen[offset : None if nbytes is None else offset + nbytes])

    def create(self, name: str, *, padded: bool = False) -> File:
        """Make an empty file; one of that name is emptied."""
        self._begin(names=True)
        if (content := self._names.get(name)) is None:
            content = _Content()
            self._change({name: content})
        else:
            # As with `O_TRUNC`: the name keeps meaning the file that it meant.
            content.empty()
            self._cut_if_due()
        content.padded = padded
        return _SimulatedFile(self, content)

    def reopen(self, name: str) -> File:
        """Open a file that there is, to append to it."""
        return _SimulatedFile(self, self._find(name))

    def truncate(self, name: str, nbytes: int) -> None:
        """Cut a file to its first bytes, and sync that."""
        content = self._find(name)
        self._begin()
        self._cut_if_due()
        content.cut(nbytes)
        self._sync(content)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name."""
        content = self._find(source)
        self._begin(names=True)
        self._change({source: None, target: content})

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._find(name)
        self._begin(names=True)
        self._change({name: None})

    def sync_folder(self) -> None:
        """Let all names outlive a power cut."""
        self._begin(names=True)
        self._cut_if_due()
        self._fail_if_due()
        for change in self._changes:
            _apply(change, self._synced_names)
        self._changes.clear()

    # -- what a `File` does ----------------------------------------------------------------------------------

    def append(self, content: _Content, data: bytes) -> None:
        """Append to a file what there is room for."""
        self._begin()
        room = len(data) if self.capacity_bytes is None else max(0, self.capacity_bytes - self.used_bytes)
        if self.failing_writes:
            self.failing_writes -= 1
            content.seen += data[: self._random.randint(0, min(room, len(data)))]
            raise _error(errno.EIO)
        content.seen += data[:room]
        self._cut_if_due(content, min(room, len(data)))
        if room < len(data):
            raise _error(errno.ENOSPC)

    def sync(self, content: _Content) -> None:
        """Sync a file's content."""
        self._begin()
        self._cut_if_due()
        self._sync(content)

    # -- inside ----------------------------------------------------------------------------------------------

    def _find(self, name: str) -> _Content:
        if (content := self._names.get(name)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return content

    def _begin(self, *, names: bool = False) -> None:
        """Count an operation, and refuse it if nothing may change."""
        self.operations += 1
        self.name_operations += names
        if self.read_only:
            raise _error(errno.EROFS)

    def _cut_if_due(self, written: _Content | None = None, nbytes: int = 0) -> None:
        """Cut the power, or kill the process, if that is to happen in this operation, which has `written` so much.

        Called after what is not lasting until it is synced, and before what is.
        """
        cut = self._cut
        if cut is None or self.count(cut.of) < cut.operation:
            return
        self._cut = None
        if cut.power:
            self._left_at_cut = _settled(self._left(self._random))
        else:
            whole = b"" if written is None else bytes(written.seen)
            if written is not None:
                del written.seen[len(whole) - self._random.randint(0, nbytes) :]
            self._left_at_cut = self._copy()
            if written is not None:
                written.seen[:] = whole
        cut.then()

    def _all_contents(self) -> list[_Content]:
        changed = [content for change in self._changes for content in change.values() if content is not None]
        return [*self._names.values(), *self._synced_names.values(), *changed]

    def _left(self, random: Random) -> dict[str, _Content]:
        """Return what a power cut now would leave."""
        names = dict(self._synced_names)
        for change in self._changes:
            if random.random() < 0.5:
                _apply(change, names)
        # Two names may mean one content: a rename may be half forgotten.
        contents = {id(content): content for _, content in sorted(names.items())}
        left = {key: content.after_power_cut(random) for key, content in contents.items()}
        return {name: left[id(content)] for name, content in names.items()}

    def _sync(self, content: _Content) -> None:
        try:
            self._fail_if_due()
        except OSError:
            content.doubt()
            raise
        content.sync()

    def _fail_if_due(self) -> None:
        if self.failing_syncs:
            self.failing_syncs -= 1
            raise _error(errno.EIO)

    def _change(self, change: _Change) -> None:
        _apply(change, self._names)
        self._changes.append(change)
        self._cut_if_due()


def _apply(change: _Change, names: dict[str, _Content]) -> None:
    for name, content in change.items():
        if content is None:
            names.pop(name, None)
        else:
            names[name] = content


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
