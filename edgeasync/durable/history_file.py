"""Write a history file: append rows, truncate it on resume, and thin it when it is too long."""

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
    """A history on a disk. Use it from one thread at a time. The file is closed between writes.

    Calls that raise `OSError` may be repeated. `begin` renames an existing file to `history.aside`,
    and `resume` renames a file that it cannot use. If a later write finds that the file is damaged,
    it also renames the file and raises `StorageError`. The next call then begins a new file. After
    `resume`, `updates` and `evaluations` are the row numbers of the last update and the last
    evaluation. `buffered` maps each device to the row numbers of its updates that are still
    buffered.
    """

    def __init__(self, disk: Disk, rows_max: int) -> None:
        self.updates = self.evaluations = 0
        self.buffered: dict[str, list[int]] = {}
        self._disk = disk
        self._rows_max = rows_max
        self._nbytes = self._synced = self._rows = 0
        self._torn = self._in_doubt = False

    def begin(self) -> str:
        """Begin the history of a new run. If the file exists, rename it and return a warning."""
        if HISTORY_FILE not in self._disk.names():
            return ""
        return self._put_aside("belongs to another run")

    def resume(self, entry: int, time_s: float) -> tuple[list[Row], str]:
        """Resume after journal entry `entry`, and discard later rows.

        A row without an entry is discarded if it is later than `time_s`. If a block must be
        truncated, return its remaining rows. Also return a warning if the file was renamed.

        Then pass the returned rows to `append` or, if there are none, call `sync`. Rows are removed
        from the file only by that call. It rewrites the whole file, because it is unknown which
        bytes the last process has synced.
        """
        disk = self._disk
        if HISTORY_FILE not in disk.names():
            return [], ""
        if disk.size(HISTORY_FILE) > FILE_BYTES_MAX:
            return [], self._put_aside("is too long to be written by a hub")
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
        """Append rows. After an error, none of these rows counts as written."""
        thinned = self._rows > 0 and self._rows + count_rows(rows) > self._rows_max
        if self._in_doubt or thinned:
            self._rewrite(rows, thinned=thinned)
        else:
            self._append(rows)

    def sync(self) -> None:
        """Sync all appended rows to disk."""
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
            self._in_doubt = True  # any part may be missing on disk, and the next sync would not report this
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
        """Rewrite the file with the rows in `more` appended. If `thinned`, thin older rows.

        The old file remains until the new one is complete.
        """
        disk = self._disk
        content = disk.read(HISTORY_FILE, 0, self._nbytes)
        found = scan(content)
        places, rows = found.places, sum(place.rows for place in found.places)
        # After a failed sync the disk may have lost the last blocks. Otherwise all written blocks must be there.
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
            with contextlib.suppress(OSError):  # free the space of the partial file
                disk.remove(_PART)
            raise
        self._nbytes, self._rows = sum(map(len, parts)), rows + count_rows(more)
        self._synced = 0  # the renaming may not be on disk yet
        self._torn = self._in_doubt = False

    def _thin(
        self, content: Buffer, places: list[BlockPlace], half: int
    ) -> tuple[list[bytes], int, list[BlockPlace]]:
        """Thin the older half of the rows.

        Return the new blocks of this half, their number of rows, and the unchanged later blocks.
        Rows whose number is a multiple of a certain power of two are kept. So the remaining rows
        are evenly spaced from the beginning of the run, no matter how often the file is thinned.
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
        """Rename a file that was found damaged during a write; raises `StorageError`."""
        raise StorageError(self._put_aside(why))

    def _put_aside(self, why: str) -> str:
        self._disk.rename(HISTORY_FILE, ASIDE_FILE)
        self._nbytes = self._synced = self._rows = 0
        self._torn = self._in_doubt = False
        return f"{HISTORY_FILE}: {why}; renamed it to {ASIDE_FILE} and started a new one"


class _Seen:
    """Collects the number of the last row of each kind, and the updates that are still buffered."""

    def __init__(self) -> None:
        self.updates = self.evaluations = 0
        self._waiting: dict[int, str] = {}

    def add(self, rows: Sequence[Row]) -> None:
        """Process rows in their order."""
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
        """Return the row numbers of updates that are still buffered, by device."""
        found: dict[str, list[int]] = {}
        for number, device in self._waiting.items():
            found.setdefault(device, []).append(number)
        return found
