"""The writing end of a history: appended to, cut back to where a hub resumes, and thinned where it is too long."""

import contextlib
from collections.abc import Sequence
from typing import NoReturn

from edgeasync.core.hub.outcomes import BUFFERED
from edgeasync.durable.disk import Disk
from edgeasync.durable.history import (
    BLOCK_ROWS_MAX,
    FILE_BYTES_MAX,
    FILE_HEADER,
    HISTORY_FILE,
    BlockPlace,
    Correction,
    EvaluationRow,
    Row,
    UpdateRow,
    blocks,
    correct,
    count_rows,
    scan,
    write_blocks,
)
from edgeasync.errors import StorageError
from edgeasync.protocol.wire import Buffer

ASIDE_FILE = f"{HISTORY_FILE}.aside"
_PART = f"{HISTORY_FILE}.part"


class HistoryFile:
    """A history on a disk, used by one thread at a time; it is kept closed between two writes.

    What raises `OSError` may be called again. A file that cannot be read is put aside. So is one that is damaged
    while it is written; that raises `StorageError`, and the next call begins a new one.
    After `resume`, `updates` and `evaluations` are the numbers of the last rows, and `buffered` has the rows of
    updates that still wait, by their devices.
    """

    def __init__(self, disk: Disk, rows_max: int) -> None:
        self.updates = self.evaluations = 0
        self.buffered: dict[str, list[int]] = {}
        self._disk = disk
        self._rows_max = rows_max
        self._nbytes = self._synced = self._rows = 0
        self._torn = self._in_doubt = False

    def begin(self) -> str:
        """Begin a run's history; put one aside that is there, and return a sentence about that."""
        if HISTORY_FILE not in self._disk.names():
            return ""
        return self._put_aside("is of another run")

    def resume(self, entry: int, time_s: float) -> tuple[list[Row], str]:
        """Cut off what came after an entry or, of rows without an entry, after a time.

        Return the rows of the block that was cut through, and a sentence if the file was put aside. The file stays
        as it is until `append`, which must be given these rows, or `sync` has written it once more: nobody knows
        what of it the last process has synced.
        """
        disk = self._disk
        if HISTORY_FILE not in disk.names():
            return [], ""
        if disk.size(HISTORY_FILE) > FILE_BYTES_MAX:
            return [], self._put_aside("is longer than any history")
        content = disk.read(HISTORY_FILE)
        found = scan(content)
        if found.trouble:
            return [], self._put_aside(found.trouble)

        def belongs(row: Row) -> bool:
            return row.entry <= entry if row.entry else row.time_s <= time_s

        self._nbytes = min(found.end, len(FILE_HEADER))
        seen, again = _Seen(), list[Row]()
        try:
            for place, rows in zip(found.places, blocks(content, found.places), strict=True):
                kept = [row for row in rows if belongs(row)]
                seen.add(kept)
                if len(kept) < len(rows):
                    again = kept
                    break
                self._nbytes = place.end
                self._rows += place.rows
        except StorageError as error:
            return [], self._put_aside(str(error))
        self.updates, self.evaluations, self.buffered = seen.updates, seen.evaluations, seen.buffered()
        self._in_doubt = True
        return again, ""

    def append(self, rows: Sequence[Row]) -> None:
        """Append rows; after an error none of them counts as written."""
        thinned = self._rows > 0 and self._rows + count_rows(rows) > self._rows_max
        if self._in_doubt or thinned:
            self._rewrite(rows, thinned=thinned)
        else:
            self._append(rows)

    def sync(self) -> None:
        """Return once all rows so far would outlive a power cut."""
        if self._in_doubt:
            self._rewrite((), thinned=False)
        elif self._torn or not self._nbytes:
            self._append(())
        if self._synced == self._nbytes:
            return
        file = self._disk.reopen(HISTORY_FILE)
        try:
            file.sync()
        except BaseException:
            self._in_doubt = True  # the disk may hold any part of it, and does not say so again
            raise
        finally:
            file.close()
        self._disk.sync_folder()
        self._synced = self._nbytes

    def _append(self, rows: Sequence[Row]) -> None:
        if self._torn:
            self._disk.truncate(HISTORY_FILE, self._nbytes)
            self._torn = False
        parts = write_blocks(rows, self._synced)
        begins = not self._nbytes
        if begins:
            parts.insert(0, FILE_HEADER)
        try:
            with contextlib.closing((self._disk.create if begins else self._disk.reopen)(HISTORY_FILE)) as file:
                file.write(parts)
        except BaseException:
            self._torn = not begins
            raise
        self._nbytes += sum(map(len, parts))
        self._rows += count_rows(rows)

    def _rewrite(self, more: Sequence[Row], *, thinned: bool) -> None:
        """Write the file once more, with more rows at its end, and with fewer before them if it is too long.

        The old file stays until the new one is whole.
        """
        disk = self._disk
        content = disk.read(HISTORY_FILE, 0, self._nbytes)
        found = scan(content)
        places, rows = found.places, sum(place.rows for place in found.places)
        # After a failed sync the disk may have lost the last blocks; otherwise all that was written must be there.
        if found.trouble or (rows < self._rows and not self._in_doubt):
            self._begin_again(found.trouble or f"damaged at byte {found.end}")
        older: list[bytes] = []
        try:
            if thinned and rows:
                older, count, places = self._thin(content, places, rows // 2)
                rows = count + sum(place.rows for place in places)
        except StorageError as error:
            self._begin_again(str(error))
        parts = [
            FILE_HEADER,
            *older,
            *(content[place.start : place.end] for place in places),
            *write_blocks(more, 0),
        ]
        try:
            with contextlib.closing(disk.create(_PART)) as file:
                file.write(parts)
                file.sync()
            disk.rename(_PART, HISTORY_FILE)
        except BaseException:
            with contextlib.suppress(OSError):  # what is half written would fill a full disk
                disk.remove(_PART)
            raise
        self._nbytes, self._rows = sum(map(len, parts)), rows + count_rows(more)
        self._synced = 0  # its name may not be on disk yet
        self._torn = self._in_doubt = False

    def _thin(
        self, content: Buffer, places: list[BlockPlace], half: int
    ) -> tuple[list[bytes], int, list[BlockPlace]]:
        """Return new blocks of the older half, with one row of several, how many rows they have, and later blocks.

        Rows stay whose number is a multiple of a power of two. So what is left of the older half
        lies evenly over all updates since the run began, however often this is done.
        """
        older, rows = 0, 0
        while rows < max(1, half):
            rows += places[older].rows
            older += 1
        seen, corrected = _Seen(), dict[int, str]()
        for block in blocks(content, places[:older]):
            seen.add(block)
            corrected |= {row.row: row.outcome for row in block if isinstance(row, Correction)}
        stride = 2
        while (seen.updates + seen.evaluations) // stride > self._rows_max // 4:
            stride *= 2
        parts, waiting, passed, stay = list[bytes](), list[Row](), 0, 0
        for block in blocks(content, places[:older]):
            for row in block:
                if isinstance(row, Correction):
                    continue
                if passed >= half or row.row % stride == 0:
                    waiting.append(correct(row, corrected) if isinstance(row, UpdateRow) else row)
                    stay += 1
                passed += 1
            while len(waiting) >= BLOCK_ROWS_MAX:
                parts += write_blocks(waiting[:BLOCK_ROWS_MAX], 0)
                del waiting[:BLOCK_ROWS_MAX]
        return parts + write_blocks(waiting, 0), stay, places[older:]

    def _begin_again(self, why: str) -> NoReturn:
        """Put a damaged file aside while it is written; raises `StorageError`."""
        raise StorageError(self._put_aside(why))

    def _put_aside(self, why: str) -> str:
        self._disk.rename(HISTORY_FILE, ASIDE_FILE)
        self._nbytes = self._synced = self._rows = 0
        self._torn = self._in_doubt = False
        return f"{HISTORY_FILE}: {why}; it is now {ASIDE_FILE}, and a new one begins"


class _Seen:
    """The number of the last row of each kind, and the updates that still wait."""

    def __init__(self) -> None:
        self.updates = self.evaluations = 0
        self._waiting: dict[int, str] = {}

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows, which come in their order."""
        for row in rows:
            if isinstance(row, UpdateRow):
                self.updates = row.row
                if row.outcome == BUFFERED:
                    self._waiting[row.row] = row.device
            elif isinstance(row, EvaluationRow):
                self.evaluations = row.row
            else:
                self._waiting.pop(row.row, None)

    def buffered(self) -> dict[str, list[int]]:
        """Return the rows of updates that wait, by their devices."""
        found: dict[str, list[int]] = {}
        for number, device in self._waiting.items():
            found.setdefault(device, []).append(number)
        return found
