"""The history of a run: one row for each update that the hub decided about, and for each evaluation.

The file `history` is a header and blocks, which are appended. A block is a header and a msgpack array of some
hundred rows, deflated, and stands for itself. But what became of an update that waited is in a later block, as a
correction. So who reads or copies the file while a hub writes it has all blocks up to one that is not whole.

`docs/reference/files.md` describes every byte.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.durable.disk import ReadableDisk
from edgeasync.errors import StorageError
from edgeasync.protocol.wire import Buffer, checksum

HISTORY_FILE = "history"

FORMAT = 2

ROWS_MAX = 200_000
"""How many rows a hub keeps by default: some 6 MB."""

ROWS_READ_MAX = 2_000_000
"""Twice the most that a hub can be told to keep."""

BLOCK_ROWS_MAX = 512
BLOCK_BYTES_MAX = 16 << 20
"""A block's bytes, inflated: what is longer was not written by a hub."""

FILE_BYTES_MAX = 1 << 30

_MAGIC = b"EAHISTRY"
_BLOCK_MAGIC = b"EAHB"
_FILE_HEADER = struct.Struct("<8sIQ")
_BLOCK_HEADER = struct.Struct("<4sIIQQ")
_DEFLATE_LEVEL = 1


_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class UpdateRow(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """An update.

    `row` counts the updates of the run from 1; the numbers of those that were thinned out are missing. `entry` is
    the number of the journal's entry, 0 without a journal. `version` is the newest after it, and `updates` is how
    many are part of the model then. `number` counts the device's updates. `nbytes` are those of the coded update.
    A value that nobody knows is `None`.
    """

    row: _Count
    entry: _Count
    time_s: float
    version: _Count
    updates: _Count
    device: str
    number: _Count
    outcome: str
    loss: float | None
    staleness: _Count | None
    local_steps: _Count
    examples: _Count
    nbytes: _Count
    metrics: dict[str, float] | None = None


class EvaluationRow(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """An evaluation of a version; `row` counts them."""

    row: _Count
    entry: _Count
    time_s: float
    version: _Count
    loss: float
    accuracy: float | None


class Correction(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """What became of an update that waited: the outcome of an earlier `row` from then on. It is not counted."""

    row: _Count
    entry: _Count
    time_s: float
    outcome: str


Row = UpdateRow | EvaluationRow | Correction


class BlockPlace(msgspec.Struct, frozen=True):
    """Where a block lies in the file, and how many rows it has.

    `synced` bytes of the file would have outlived a power cut when it was written.
    """

    start: int
    end: int
    rows: int
    synced: int


class Rows(msgspec.Struct):
    """Updates and evaluations, in their order; `trouble` says why there may be fewer."""

    updates: list[UpdateRow] = []
    evaluations: list[EvaluationRow] = []
    trouble: str = ""


class Scan(msgspec.Struct):
    """The blocks that are whole, and where they end; `trouble` if more than an unfinished write follows."""

    places: list[BlockPlace] = []
    end: int = 0
    trouble: str = ""


FILE_HEADER = _FILE_HEADER.pack(_MAGIC, FORMAT, checksum(_MAGIC + FORMAT.to_bytes(4, "little")))

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Row]).decode


def write_blocks(rows: Sequence[Row], synced: int) -> list[bytes]:
    """Return rows as blocks; `synced` bytes of the file before them would outlive a power cut."""
    parts = []
    for start in range(0, len(rows), BLOCK_ROWS_MAX):
        some = rows[start : start + BLOCK_ROWS_MAX]
        body = zlib.compress(_encode(some), _DEFLATE_LEVEL)
        header = _BLOCK_HEADER.pack(_BLOCK_MAGIC, len(body), count_rows(some), synced, 0)[:-8]
        parts.append(header + checksum(header, body).to_bytes(8, "little") + body)
    return parts


def count_rows(rows: Sequence[Row]) -> int:
    """Return how many rows there are, without corrections."""
    return sum(type(row) is not Correction for row in rows)


def scan(content: Buffer) -> Scan:
    """Return what of a history's file is whole; nothing is inflated."""
    view, found = memoryview(content), Scan()
    if (trouble := _trouble_at_the_start(view)) is not None:
        found.trouble = trouble
        return found
    found.end = _FILE_HEADER.size
    while (whole := _block_at(view, found.end)) is not None:
        found.places.append(whole)
        found.end = whole.end
    # Pages reach a disk in any order: a block behind what is not whole is damage only if that had been synced.
    place = found.end
    raw = bytes(view[place:])
    start = raw.find(_BLOCK_MAGIC, 1)
    while start >= 0:
        later = _block_at(view, place + start)
        if later is not None and later.synced > place:
            found.trouble = f"damaged at byte {place}"
            break
        start = raw.find(_BLOCK_MAGIC, start + 1)
    return found


def blocks(content: Buffer, places: Sequence[BlockPlace]) -> Iterator[list[Row]]:
    """Yield the rows of blocks; raises `StorageError` for what no hub has written."""
    view = memoryview(content)
    for place in places:
        inflate = zlib.decompressobj()
        try:
            rows = _decode(inflate.decompress(view[place.start + _BLOCK_HEADER.size : place.end], BLOCK_BYTES_MAX))
        except (zlib.error, msgspec.DecodeError, ValueError) as error:
            raise StorageError(f"damaged at byte {place.start}: {error}") from error
        if place.rows != count_rows(rows):
            raise StorageError(f"damaged at byte {place.start}: its rows are not as many as it says")
        yield rows


def correct(row: UpdateRow, corrected: Mapping[int, str]) -> UpdateRow:
    """Return a row with the outcome that corrections give it; `corrected` has them by the number of the row."""
    outcome = corrected.get(row.row)
    return row if outcome is None else msgspec.structs.replace(row, outcome=outcome)


def read_rows(disk: ReadableDisk, nbytes: int | None = None) -> Rows:
    """Return the history on a disk, or what is in its first bytes; raises nothing for a damaged one."""
    rows = Rows()
    try:
        if disk.size(HISTORY_FILE) > FILE_BYTES_MAX:
            rows.trouble = "it is longer than any history"
            return rows
        content = disk.read(HISTORY_FILE, 0, nbytes)
    except FileNotFoundError:
        rows.trouble = "there is no history in this folder: no hub has run there, or history_rows_max is 0"
        return rows
    except OSError as error:
        rows.trouble = f"the history cannot be read: {error.strerror or error}"
        return rows
    found = scan(content)
    rows.trouble = found.trouble
    if sum(place.rows for place in found.places) > ROWS_READ_MAX:
        rows.trouble = "it has more rows than any hub keeps"
        return rows
    corrected: dict[int, str] = {}
    try:
        for block in blocks(content, found.places):
            rows.updates += [row for row in block if type(row) is UpdateRow]
            rows.evaluations += [row for row in block if type(row) is EvaluationRow]
            corrected |= {row.row: row.outcome for row in block if type(row) is Correction}
    except StorageError as error:
        rows.trouble = str(error)
    rows.updates = [correct(row, corrected) for row in rows.updates]
    return rows


def _trouble_at_the_start(view: memoryview) -> str | None:
    """Return why nothing of a file can be read; nothing for a header that is sound."""
    if len(view) < _FILE_HEADER.size:
        return ""  # an unfinished write
    magic, version, digest = _FILE_HEADER.unpack_from(view)
    if magic != _MAGIC or digest != checksum(view[:12]):
        return "damaged at byte 0"
    if version != FORMAT:
        return f"it is of format {version}, and this edgeasync reads format {FORMAT}"
    return None


def _block_at(view: memoryview, start: int) -> BlockPlace | None:
    """Return the block that begins there; `None` if it is not whole."""
    if start + _BLOCK_HEADER.size > len(view):
        return None
    magic, nbytes, rows, synced, digest = _BLOCK_HEADER.unpack_from(view, start)
    body = start + _BLOCK_HEADER.size
    end = body + nbytes
    if magic != _BLOCK_MAGIC or end > len(view) or digest != checksum(view[start : body - 8], view[body:end]):
        return None
    return BlockPlace(start, end, rows, synced)
