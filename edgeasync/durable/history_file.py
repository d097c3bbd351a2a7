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
    Block,
    BlockPlace,
    Correction,
    EvaluationRow,
    Last,
    UpdateRow,
    blocks,
    correct,
    last_of,
    scan,
    write_block,
)
from edgeasync.errors import StorageError
from edgeasync.protocol.wire import Buffer

ASIDE_FILE = f"{HISTORY_FILE}.aside"
_PART = f"{HISTORY_FILE}.part"

Row = tuple[str, UpdateRow] | EvaluationRow | Correction
"""An update with its device, an evaluation, or a correction of an update."""


class HistoryFile:
    """A history on a disk, used by one thread at a time; it is kept closed between two writes.

    What raises `OSError` may be called again. A file that cannot be read is put aside. `last` is of the last row.
    So is one that is damaged while it is written; that raises `StorageError`, and the next call begins a new one.
    After `resume`, `buffered` has the rows of updates that still wait, by their devices.
    """

    def __init__(self, disk: Disk, rows_max: int) -> None:
        self.last = Last()
        self.buffered: dict[str, list[int]] = {}
        self._disk = disk
        self._rows_max = rows_max
        self._devices: dict[str, int] = {}
        self._nbytes = self._synced = self._rows = 0
        self._torn = self._in_doubt = self._named = False

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

        def belongs(last: UpdateRow | EvaluationRow | Correction | Last) -> bool:
            return last.entry <= entry if last.entry else last.time_s <= time_s

        count = next((at for at, place in enumerate(found.places) if not belongs(place.last)), len(found.places))
        again: list[Row] = []
        if count < len(found.places):
            try:
                *_, (devices, block) = blocks(content, found.places[: count + 1], [])
            except StorageError as error:
                return [], self._put_aside(str(error))
            pairs = zip(devices, block.updates, strict=True)
            again += [(device, row) for device, row in pairs if belongs(row)]
            again += [row for row in block.evaluations if belongs(row)]
            again += [row for row in block.corrections if belongs(row)]
        kept = found.places[:count]
        try:
            self.buffered = _buffered(content, kept, again)
        except StorageError as error:
            return [], self._put_aside(str(error))
        self._nbytes = kept[-1].end if kept else min(found.end, len(FILE_HEADER))
        self._rows = sum(place.rows for place in kept)
        self.last = kept[-1].last if kept else Last()
        self._in_doubt = True
        return again, ""

    def append(self, rows: Sequence[Row]) -> None:
        """Append rows; after an error none of them counts as written."""
        thinned = self._rows > 0 and self._rows + _count(rows) > self._rows_max
        if self._in_doubt or thinned:
            self._rewrite(rows, thinned=thinned)
        else:
            self._append(rows)

    def sync(self) -> None:
        """Return once all rows so far would outlive a power cut."""
        if self._named and self._synced == self._nbytes:
            return
        if self._in_doubt:
            self._rewrite((), thinned=False)
        elif self._torn or not self._nbytes:
            self._append(())
        self._sync()

    def _blocks(self, rows: Sequence[Row], synced: int) -> tuple[list[bytes], Last]:
        """Return blocks of rows for the end of a file with `synced` bytes on disk, and its last row then."""
        last, parts = self.last, []
        for start in range(0, len(rows), BLOCK_ROWS_MAX):
            block = _block(rows[start : start + BLOCK_ROWS_MAX], self._devices)
            last = last_of(block, last)
            parts.append(write_block(block, last, synced))
        return parts, last

    def _append(self, rows: Sequence[Row]) -> None:
        if self._torn:
            self._disk.truncate(HISTORY_FILE, self._nbytes)
            self._torn = False
        parts, last = self._blocks(rows, self._synced)
        begins = not self._nbytes
        if begins:
            parts.insert(0, FILE_HEADER)
        try:
            file = self._disk.create(HISTORY_FILE) if begins else self._disk.reopen(HISTORY_FILE)
            try:
                file.write(parts)
            finally:
                file.close()
        except BaseException:
            self._torn = not begins
            self._devices.clear()
            raise
        self.last = last
        self._nbytes += sum(map(len, parts))
        self._rows += _count(rows)

    def _sync(self) -> None:
        file = self._disk.reopen(HISTORY_FILE)
        try:
            file.sync()
        except BaseException:
            self._in_doubt = True  # the disk may hold any part of it, and does not say so again
            raise
        finally:
            file.close()
        self._disk.sync_folder()
        self._named = True
        self._synced = self._nbytes

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
        self._rows = rows
        try:
            older, newer = self._thin(content, places) if thinned and rows else (Thinned(), places)
        except StorageError as error:
            self._begin_again(str(error))
        added, last = self._blocks(more, 0)
        parts = [FILE_HEADER, *older.parts, *(content[place.start : place.end] for place in newer), *added]
        try:
            with contextlib.closing(disk.create(_PART)) as file:
                file.write(parts)
                file.sync()
            disk.rename(_PART, HISTORY_FILE)
        except BaseException:
            self._devices.clear()
            with contextlib.suppress(OSError):  # what is half written would fill a full disk
                disk.remove(_PART)
            raise
        self.last = last
        self._nbytes = self._synced = sum(map(len, parts))
        self._rows = older.rows + sum(place.rows for place in newer) + _count(more)
        self._torn = self._in_doubt = self._named = False

    def _thin(self, content: Buffer, places: list[BlockPlace]) -> "tuple[Thinned, list[BlockPlace]]":
        """Return new blocks of the older half, with one row of several, and the blocks behind them as they are.

        Rows stay whose number is a multiple of a power of two. So what is left of the older half
        lies evenly over all updates since the run began, however often this is done.
        """
        half, older, rows = self._rows // 2, 0, 0
        while rows < max(1, half):
            rows += places[older].rows
            older += 1
        last, stride = places[older - 1].last, 2
        while (last.updates + last.evaluations) // stride > self._rows_max // 4:
            stride *= 2
        thinned, names = Thinned(), list[str]()
        waiting, seen = list[Row](), 0
        corrections = [one for _, block in blocks(content, places[:older], []) for one in block.corrections]
        corrected = {one.row: one.outcome for one in corrections}
        for devices, block in blocks(content, places[:older], names):
            updates = [correct(row, corrected) for row in block.updates]
            rows_here: list[tuple[str, UpdateRow] | EvaluationRow] = [
                *zip(devices, updates, strict=True),
                *block.evaluations,
            ]
            for row in rows_here:
                number = row.row if isinstance(row, EvaluationRow) else row[1].row
                if seen >= half or number % stride == 0:
                    waiting.append(row)
                seen += 1
            while len(waiting) >= BLOCK_ROWS_MAX:
                thinned.add(waiting[:BLOCK_ROWS_MAX])
                del waiting[:BLOCK_ROWS_MAX]
        thinned.add(waiting)
        # The blocks that follow are copied as they are: they go by the names that were told up to there.
        thinned.parts.append(write_block(Block(0, names, [], [], []), last, 0))
        return thinned, places[older:]

    def _begin_again(self, why: str) -> NoReturn:
        """Put a damaged file aside while it is written; raises `StorageError`."""
        sentence = self._put_aside(why)
        self._devices.clear()
        self._nbytes = self._synced = self._rows = 0
        self._torn = self._in_doubt = self._named = False
        raise StorageError(sentence)

    def _put_aside(self, why: str) -> str:
        self._disk.rename(HISTORY_FILE, ASIDE_FILE)
        return f"{HISTORY_FILE}: {why}; it is now {ASIDE_FILE}, and a new one begins"


class Thinned:
    """New blocks of rows that stay."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.rows = 0
        self._devices: dict[str, int] = {}
        self._last = Last()

    def add(self, rows: Sequence[Row]) -> None:
        """Add a block of these rows."""
        block = _block(rows, self._devices)
        self._last = last_of(block, self._last)
        self.parts.append(write_block(block, self._last, 0))
        self.rows += len(rows)


def _block(rows: Sequence[Row], known: dict[str, int]) -> Block:
    """Return a block of rows; the names of devices that are not known yet are told, and known from then on."""
    before, devices = len(known), list[str]()
    places, updates, evaluations, corrections = [], [], [], []
    for row in rows:
        if isinstance(row, EvaluationRow):
            evaluations.append(row)
            continue
        if isinstance(row, Correction):
            corrections.append(row)
            continue
        device, update = row
        place = known.get(device)
        if place is None:
            place = known[device] = len(known)
            devices.append(device)
        places.append(place)
        updates.append(update)
    return Block(before, devices, places, updates, evaluations, corrections)


def _count(rows: Sequence[Row]) -> int:
    return sum(not isinstance(row, Correction) for row in rows)


def _buffered(content: Buffer, places: list[BlockPlace], again: Sequence[Row]) -> dict[str, list[int]]:
    """Return the rows whose updates wait, by their devices; raises `StorageError`."""
    waiting: dict[int, str] = {}
    rows = [*again]
    for devices, block in blocks(content, places, []):
        pairs = zip(devices, block.updates, strict=True)
        waiting |= {row.row: device for device, row in pairs if row.outcome == BUFFERED}
        for one in block.corrections:
            waiting.pop(one.row, None)
    for row in rows:
        if isinstance(row, tuple) and row[1].outcome == BUFFERED:
            waiting[row[1].row] = row[0]
    for row in rows:
        if isinstance(row, Correction):
            waiting.pop(row.row, None)
    found: dict[str, list[int]] = {}
    for number, device in waiting.items():
        found.setdefault(device, []).append(number)
    return found
