"""The journal of a run: the events that the hub received, synced before the hub answers them.

Records are numbered 1, 2, 3 and so on over the whole run. They are stored in segments, which are
files named `journal-00000001` and so on. A segment starts with a header that contains the number of
its first record. A record consists of a header, an entry and a payload. All numbers are
little-endian:

    segment header   magic `EAJOURNL`, format u32, first record's number u64, XXH3-64 of these
    record header    number u64, number of the last record synced before u64, bytes of the entry
                     u32, bytes of the payload u32, XXH3-64 of the payload or 0 if it is empty,
                     XXH3-64 of these and the entry

Three expected failures leave invalid bytes at the end of a segment: a crash during a write, a
failed write, and a failed sync, after which the content of the disk is unknown. The writer then
abandons the segment and writes the same records, with the same numbers, to a new segment. Therefore
a segment is only read up to the record before the first record of a later segment. If a valid
record follows invalid bytes, the number of the last record synced before it shows whether the
invalid bytes were caused by a crash or by damage.

Zeros that fill up a block may follow the last record, because a writer writes whole blocks. They
are cut off when the segment is closed, but not by a crash.

A reader can see records that are not on disk yet. The previous writer may have been killed before
it synced the last batch, or before it synced the folder with the segment's name. The sync may also
have failed. So the next writer first writes the last batch again and syncs the folder. Only then do
the records that were read become visible to others. A new segment is written with its first batch
under a temporary name, and is renamed after the sync. Until then, the records of the previous
segment are used.
"""

import contextlib
import re
import struct
from collections.abc import Generator, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from edgeasync.durable.direct_file import BLOCK_BYTES
from edgeasync.durable.disk import Disk, File, ReadableDisk
from edgeasync.errors import StorageError
from edgeasync.protocol.wire import Buffer, checksum

SEGMENT_BYTES_MAX = 64 << 20
"""Size at which a segment is followed by a new one. A batch of records is never split."""

BEHIND_MAX = 1 << 10
"""Number of records to scan after an unreadable one, to distinguish damage from a torn write."""

WINDOW_BYTES = 1 << 20
"""Number of bytes per read.

Regardless of the length of a segment, a reader needs memory for this window, two records and the
last batch.
"""

_MAGIC = b"EAJOURNL"
_FORMAT = 2
"""The only supported format. Increase it when an entry changes."""

_SEGMENT_HEADER = struct.Struct("<8sIQQ")
_RECORD_HEADER = struct.Struct("<QQIIQQ")
_NAME = re.compile(r"journal-([0-9]{8,})")
_PART = "journal.part"


Appended = tuple[Buffer, Buffer | None] | tuple[Buffer, Buffer | None, int | None]
"""A record to append: an entry, a payload or `None`, and the payload's checksum if it is known."""


class Record(msgspec.Struct, frozen=True):
    """A record. Its parts may be views of a larger buffer, so copy parts that you store."""

    number: int
    entry: Buffer
    payload: Buffer


class Segment(msgspec.Struct):
    """A file of records: its name, the number of its first record, and its number of valid bytes."""

    name: str
    first: int
    nbytes: int


class TornTail(msgspec.Struct, frozen=True):
    """Invalid bytes at the end of a segment, from `offset` on.

    If `offset` is 0, the whole segment is invalid.
    """

    segment: str
    offset: int
    nbytes: int


class JournalReading:
    """Reads the records whose numbers are above `after`.

    The attributes are complete once `records` is exhausted. `last` is the number of the last
    record, or `after` if there were no records. `segments` contains the segments whose header is
    readable, in order. `unsynced` contains the records of the last batch. A `JournalWriter` needs
    these three values when it starts. `torn` contains the invalid bytes that crashes have left.
    """

    def __init__(self, disk: ReadableDisk, after: int = 0) -> None:
        self._disk = disk
        self.last = after
        self.segments: list[Segment] = []
        self.unsynced: list[Appended] = []
        self.torn: list[TornTail] = []
        self.finished = False

    def records(self) -> Iterator[Record]:
        """Yield the records with numbers above `after`, in order and without gaps.

        Raises `StorageError` if records are missing or damaged for any reason other than a crash,
        if a segment has another format, or if the disk cannot be read.
        """
        causes = self._scan()
        ends: list[int | None] = [None]
        for later in reversed(self.segments[1:]):
            ends.append(later.first if ends[-1] is None else min(later.first, ends[-1]))
        for segment, end in zip(self.segments, reversed(ends), strict=False):
            if end is not None and end <= self.last + 1:
                continue  # it has no records above `after`
            if segment.first > self.last + 1:
                cause = f" ({', '.join(causes)})" if causes else ""
                raise StorageError(
                    f"{segment.name}: starts with record {segment.first}, but {_missing(self.last, segment.first)}"
                    f"{cause}; {_REMEDY}"
                )
            valid = yield from self._of(segment, end)
            if end is None:
                yield from self._end(segment, valid)
            elif valid != segment.nbytes and self.last + 1 < end:
                causes.append(f"{segment.name} is damaged at byte {valid}")
        self.finished = True

    def _end(self, segment: Segment, valid: int) -> Iterator[Record]:
        """Decide what the bytes after the valid ones of the last segment are."""
        failed: int | None = None
        while not (padded := self._is_padding(segment, valid)) and self._was_synced(segment, valid):
            if valid == failed:
                raise StorageError(
                    f"{segment.name}: damaged at byte {valid}: record {self.last + 1} was synced but cannot "
                    f"be read; {_REMEDY}"
                )
            failed = valid
            valid = yield from self._of(segment, None)  # a hub may have written the record after it was read
        if not padded:
            self.torn.append(TornTail(segment.name, valid, segment.nbytes - valid))
        segment.nbytes = valid

    def _scan(self) -> list[str]:
        """Read the headers of all segments; return an error for each invalid one."""
        unreadable = []
        try:
            for name in segment_names(self._disk):
                nbytes = self._disk.size(name)
                first = _read_header(name, self._disk.read(name, 0, _SEGMENT_HEADER.size))
                if first is not None:
                    self.segments.append(Segment(name, first, nbytes))
                    continue
                unreadable.append(name)
                if nbytes <= _SEGMENT_HEADER.size:
                    self.torn.append(TornTail(name, 0, nbytes))
        except OSError as error:
            raise _unreadable("the journal", error) from error
        # A header is synced before records follow it, so a crash does not leave records after a bad one.
        last = self.segments[-1].name if self.segments else ""
        short = {tail.segment for tail in self.torn}
        for name in unreadable:
            if _ordinal(name) > _ordinal(last) and name not in short:
                raise StorageError(f"{name}: invalid header, followed by more bytes; {_REMEDY}")
        return [f"{name} has an invalid header" for name in unreadable]

    def _is_padding(self, segment: Segment, offset: int) -> bool:
        """Return whether `offset` is followed by nothing, or by zeros that fill up the last block."""
        count = segment.nbytes - offset
        fills = count == -offset % BLOCK_BYTES
        return not count or (fills and bytes(_read(self._disk, segment.name, offset)) == bytes(count))

    def _was_synced(self, segment: Segment, offset: int) -> bool:
        """Return whether a later record proves that the unreadable record at `offset` was synced.

        Disks may write pages in any order. So after a crash, later records of a write may be on
        disk while earlier ones are missing.
        """
        rest = bytes(_read(self._disk, segment.name, offset))
        for place, number in _places_of(range(self.last + 2, self.last + BEHIND_MAX), rest):
            if not _may_be_record(rest, place):
                continue
            walk = _Walk(self._disk, Segment(segment.name, number, segment.nbytes))
            walk.offset = offset + place
            if any(walk.synced > self.last for _ in walk.records(None)):
                return True
        return False

    def _of(self, segment: Segment, end: int | None) -> Generator[Record, None, int]:
        """Yield the records of a segment that have numbers above `last` and below `end`.

        Return the offset at which the segment's valid bytes end.
        """
        walk = _Walk(self._disk, segment)
        for record in walk.records(end):
            if end is None:
                if record.number == walk.synced + 1:
                    self.unsynced = []
                self.unsynced.append((record.entry, record.payload))
            if record.number > self.last:
                self.last = record.number
                yield record
        if end is None and walk.number <= self.last:
            self.unsynced = []  # a checkpoint covers them
        return walk.offset


class _Walk:
    """Iterates over the records of a segment, one window of bytes at a time.

    `offset` is the end of the valid records read so far.
    """

    def __init__(self, disk: ReadableDisk, segment: Segment) -> None:
        self._disk = disk
        self._segment = segment
        self._window = memoryview(b"")
        self._start = 0
        self.synced = 0
        """The number of the last synced record, as stated in the header of the current record."""
        self.number = segment.first
        """The number of the next record."""
        self.offset = _SEGMENT_HEADER.size

    def records(self, end: int | None) -> Iterator[Record]:
        """Yield valid records up to the first invalid one or, if `end` is set, before number `end`."""
        while self.number != end:
            header = self._bytes(_RECORD_HEADER.size)
            if header is None:
                return
            found, synced, entry_bytes, payload_bytes, payload_digest, digest = _RECORD_HEADER.unpack(header)
            body = self._bytes(_RECORD_HEADER.size + entry_bytes + payload_bytes) if found == self.number else None
            if body is None:
                return
            entry = body[_RECORD_HEADER.size : _RECORD_HEADER.size + entry_bytes]
            payload = body[_RECORD_HEADER.size + entry_bytes :]
            if digest != checksum(body[: _RECORD_HEADER.size - 8], entry):
                return
            if payload_digest != (checksum(payload) if payload_bytes else 0):
                return
            self.offset += len(body)
            self.synced = synced
            self.number += 1
            yield Record(found, entry, payload)

    def _bytes(self, nbytes: int) -> memoryview | None:
        """Return the next bytes without advancing, or `None` at the end of the file."""
        if self.offset + nbytes > self._segment.nbytes:
            return None
        if self.offset + nbytes > self._start + len(self._window):
            content = _read(self._disk, self._segment.name, self.offset, max(nbytes, WINDOW_BYTES))
            self._window, self._start = memoryview(content), self.offset
        part = self._window[self.offset - self._start :][:nbytes]
        return part if len(part) == nbytes else None


def _read(disk: ReadableDisk, name: str, offset: int, nbytes: int | None = None) -> Buffer:
    try:
        return disk.read(name, offset, nbytes)
    except OSError as error:
        raise _unreadable(name, error) from error


def _places_of(numbers: range, content: bytes) -> Iterator[tuple[int, int]]:
    """Yield each offset at which one of `numbers` occurs as a u64, and that number.

    Offsets need not be aligned. A separate search for each number would take seconds for a large
    torn write.
    """
    for shift in range(min(8, max(0, len(content) - 7))):
        found = np.frombuffer(content, "<u8", (len(content) - shift) // 8, shift)
        for index in np.flatnonzero((found >= numbers.start) & (found < numbers.stop)):
            yield shift + 8 * int(index), int(found[index])


def _may_be_record(content: bytes, place: int) -> bool:
    """Return whether a record header may start at `place`.

    This rules out most places where a number merely occurs inside a payload.
    """
    if len(content) - place < _RECORD_HEADER.size:
        return False
    number, synced, entry_bytes, payload_bytes, *_ = _RECORD_HEADER.unpack_from(content, place)
    end = place + _RECORD_HEADER.size + entry_bytes + payload_bytes
    return bool(synced < number and entry_bytes > 0 and end <= len(content))


def segment_names(disk: ReadableDisk) -> list[str]:
    """Return the names of the existing segments, in order; raises `OSError`."""
    return sorted(filter(_ordinal, disk.names()), key=_ordinal)


def remove_torn_headers(disk: Disk, reading: JournalReading) -> None:
    """Remove segments that contain only a torn header; raises `StorageError`."""
    assert reading.finished
    try:
        for tail in reading.torn:
            if not tail.offset:
                disk.remove(tail.segment)
    except OSError as error:
        raise StorageError(
            f"cannot clean up the journal: {error}; check the disk and the folder's permissions"
        ) from error


class JournalWriter:
    """Appends records to a journal. Use it from one thread at a time.

    `first` is the number of the next record, and `segments` contains the existing segments. A
    writer never appends to a segment that another writer has created.
    """

    def __init__(
        self,
        disk: Disk,
        first: int,
        segments: Sequence[Segment] = (),
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
    ) -> None:
        self._disk = disk
        self._next = first
        self._segments = list(segments)
        self._segment_bytes_max = segment_bytes_max
        self._file: File | None = None  # the last segment
        self._ordinal = 0

    @property
    def next_number(self) -> int:
        """The number of the next record."""
        return self._next

    def secure(self, unsynced: Sequence[Appended]) -> None:
        """Make all records that a `JournalReading` has returned durable; raises `OSError`.

        Call it before the first `append`. `unsynced` are the records of the reading that may not be
        on disk.
        """
        if not unsynced:
            self._disk.sync_folder()
            return
        first = self._next - len(unsynced)
        try:
            self._begin(first, _records(first, unsynced))
        except BaseException:
            self._abandon(first)
            raise
        self.close()

    def append(self, records: Sequence[Appended]) -> None:
        """Write and sync records. Each consists of an entry and a payload or `None`.

        Raises `OSError` if the disk fails. In that case, none of the records counts as written, and
        the same batch may be appended again. It is then written to a new segment, with the same
        numbers.
        """
        if not records:
            return
        parts = _records(self._next, records)
        try:
            if self._file is None or self._segments[-1].nbytes > self._segment_bytes_max:
                self._begin(self._next, parts)
            else:
                self._file.write(parts)
                self._file.sync()
                self._segments[-1].nbytes += _nbytes(parts)
        except BaseException:
            self._abandon(self._next)
            raise
        self._next += len(records)

    def drop_through(self, number: int) -> None:
        """Remove segments that contain only records up to `number`; raises `OSError`.

        The current segment is never removed. A failed call may be repeated.
        """
        dropped = False
        while self._segments:
            last_one = len(self._segments) == 1
            following = self._next if last_one else self._segments[1].first
            if following - 1 > number or (last_one and self._file is not None):
                break
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(self._segments[0].name)
            del self._segments[0]
            dropped = True
        if dropped:
            self._disk.sync_folder()

    def close(self) -> None:
        """Close the current segment. All appended records are already synced."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def _begin(self, first: int, parts: Sequence[Buffer]) -> None:
        """Start the next segment with these records. They become valid when the segment is renamed."""
        self.close()
        # Also above removed segments: a power cut may undo a removal that is not synced yet.
        self._ordinal = 1 + max(self._ordinal, *(_ordinal(name) for name in self._disk.names()), 0)
        name = f"journal-{self._ordinal:08}"
        header = _SEGMENT_HEADER.pack(_MAGIC, _FORMAT, first, 0)[:-8]
        content = [header + checksum(header).to_bytes(8, "little"), *parts]
        file = self._disk.create(_PART, padded=True)
        try:
            file.write(content)
            file.sync()
            self._disk.rename(_PART, name)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):  # a partial file would fill a full disk
                self._disk.remove(_PART)
            raise
        self._file = file
        self._segments.append(Segment(name, first, _nbytes(content)))
        self._disk.sync_folder()

    def _abandon(self, first: int) -> None:
        """Abandon the current segment after a failed write.

        It is unknown how much of the write reached the disk. `first` is the number of the first
        record in that write.
        """
        if self._file is None:
            return
        self.close()
        segment = self._segments[-1]
        # This frees space on a full disk. If it fails, the rest is ignored: the next segment starts with the
        # number that failed here.
        with contextlib.suppress(OSError):
            if segment.first == first:
                self._disk.remove(segment.name)
                self._segments.pop()
            else:
                self._disk.truncate(segment.name, segment.nbytes)


_REMEDY = "restore the journal from a backup, or move it away and start from a checkpoint alone"


def _records(first: int, records: Sequence[Appended]) -> list[Buffer]:
    """Return the bytes of a batch of records, numbered from `first`."""
    parts: list[Buffer] = []
    for number, (entry, payload, *known) in enumerate(records, first):
        nbytes = 0 if payload is None else memoryview(payload).nbytes
        digest = next(iter(known), None) if nbytes else 0
        if payload is not None and digest is None:
            digest = checksum(payload)
        header = _RECORD_HEADER.pack(number, first - 1, len(entry), nbytes, digest, 0)[:-8]
        parts.append(b"".join((header, checksum(header, entry).to_bytes(8, "little"), entry)))
        if payload is not None:
            parts.append(payload)
    return parts


def _missing(last: int, following: int) -> str:
    """Return a description of the records that are missing between two numbers."""
    count = following - last - 1
    return f"record {last + 1} is missing" if count == 1 else f"records {last + 1} to {following - 1} are missing"


def _unreadable(name: str, error: OSError) -> StorageError:
    return StorageError(f"{name}: cannot be read: {error}; check the disk and the folder's permissions")


def _nbytes(parts: Iterable[Buffer]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def _ordinal(name: str) -> int:
    """Return the number in a segment's name, or 0 if the name is not that of a segment."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _read_header(name: str, header: Buffer) -> int | None:
    """Return the number of a segment's first record, or `None` if its header is torn or damaged."""
    if len(header) < _SEGMENT_HEADER.size:
        return None
    magic, version, first, digest = _SEGMENT_HEADER.unpack(header)
    if magic != _MAGIC or digest != checksum(memoryview(header)[:-8]):
        return None
    if version != _FORMAT:
        raise StorageError(
            f"{name}: has journal format {version}, but this edgeasync reads format {_FORMAT}; "
            "use the version of edgeasync that wrote it, or choose another run folder"
        )
    return int(first)
