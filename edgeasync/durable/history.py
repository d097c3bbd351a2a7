"""The format of a run's history: one row per update with an outcome, and one per evaluation.

The file `history` consists of a header and appended blocks. A block consists of a header and a
deflated msgpack array of some hundred rows. Each block can be read without the others. If an update
was buffered, its final outcome is appended in a later block as a correction. If the file is read or
copied while a hub writes to it, all blocks before the first incomplete one are valid.

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
"""Default for the maximum number of rows in the file, which is then about 6 MB long."""

ROWS_READ_MAX = 2_000_000
"""Maximum number of rows to read: twice the highest limit that can be set for a hub."""

BLOCK_ROWS_MAX = 512
BLOCK_BYTES_MAX = 16 << 20
"""Maximum size of a block after decompression. Hubs do not write longer blocks."""

FILE_BYTES_MAX = 1 << 30

_MAGIC = b"EAHISTRY"
_BLOCK_MAGIC = b"EAHB"
_FILE_HEADER = struct.Struct("<8sIQ")
_BLOCK_HEADER = struct.Struct("<4sIIQQ")
_DEFLATE_LEVEL = 1


_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class UpdateRow(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """A row for an update.

    `row` is the number of the update in the run, starting at 1. Rows that were removed by thinning
    are missing. `entry` is the number of the journal entry, or 0 without a journal. `version` is
    the newest version after the update. `updates` is the number of updates that the model contained
    at that time. `number` is the sequence number of the update on its device. `nbytes` is the size
    of the encoded update. Unknown values are `None`.
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
    """A row for an evaluation of a version. `row` is the number of the evaluation in the run."""

    row: _Count
    entry: _Count
    time_s: float
    version: _Count
    loss: float
    accuracy: float | None


class Correction(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The final outcome of a buffered update, whose earlier row has the number `row`.

    Corrections do not count as rows.
    """

    row: _Count
    entry: _Count
    time_s: float
    outcome: str


Row = UpdateRow | EvaluationRow | Correction


class BlockPlace(msgspec.Struct, frozen=True):
    """The position of a block in the file, and its number of rows.

    `synced` is the number of bytes of the file that were synced when the block was written.
    """

    start: int
    end: int
    rows: int
    synced: int


class Rows(msgspec.Struct):
    """Updates and evaluations in order. `trouble` explains why some of them may be missing."""

    updates: list[UpdateRow] = []
    evaluations: list[EvaluationRow] = []
    trouble: str = ""


class Scan(msgspec.Struct):
    """The complete blocks of a file, and the offset at which they end.

    `trouble` is set if the bytes after that offset are not just a torn write.
    """

    places: list[BlockPlace] = []
    end: int = 0
    trouble: str = ""


FILE_HEADER = _FILE_HEADER.pack(_MAGIC, FORMAT, checksum(_MAGIC + FORMAT.to_bytes(4, "little")))

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Row]).decode


def write_blocks(rows: Sequence[Row], synced: int) -> list[bytes]:
    """Encode rows as blocks. `synced` is the number of synced bytes of the file before the blocks."""
    parts = []
    for start in range(0, len(rows), BLOCK_ROWS_MAX):
        some = rows[start : start + BLOCK_ROWS_MAX]
        body = zlib.compress(_encode(some), _DEFLATE_LEVEL)
        header = _BLOCK_HEADER.pack(_BLOCK_MAGIC, len(body), count_rows(some), synced, 0)[:-8]
        parts.append(header + checksum(header, body).to_bytes(8, "little") + body)
    return parts


def count_rows(rows: Sequence[Row]) -> int:
    """Return the number of rows, without corrections."""
    return sum(type(row) is not Correction for row in rows)


def scan(content: Buffer) -> Scan:
    """Find the complete blocks of a history file without decompressing them."""
    view, found = memoryview(content), Scan()
    if (trouble := _trouble_at_the_start(view)) is not None:
        found.trouble = trouble
        return found
    found.end = _FILE_HEADER.size
    while (whole := _block_at(view, found.end)) is not None:
        found.places.append(whole)
        found.end = whole.end
    # Pages reach a disk in any order. An incomplete block is damage only if it had been synced.
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
    """Yield the rows of each block; raises `StorageError` if a block is invalid."""
    view = memoryview(content)
    for place in places:
        inflate = zlib.decompressobj()
        try:
            rows = _decode(inflate.decompress(view[place.start + _BLOCK_HEADER.size : place.end], BLOCK_BYTES_MAX))
        except (zlib.error, msgspec.DecodeError, ValueError) as error:
            raise StorageError(f"damaged at byte {place.start}: {error}") from error
        if place.rows != count_rows(rows):
            raise StorageError(f"damaged at byte {place.start}: its number of rows differs from its header")
        yield rows


def correct(row: UpdateRow, corrected: Mapping[int, str]) -> UpdateRow:
    """Return a row with its final outcome. `corrected` maps row numbers to final outcomes."""
    outcome = corrected.get(row.row)
    return row if outcome is None else msgspec.structs.replace(row, outcome=outcome)


def read_rows(disk: ReadableDisk, nbytes: int | None = None) -> Rows:
    """Read the history from a disk, or only its first `nbytes` bytes.

    If it is damaged, set `trouble`.
    """
    rows = Rows()
    try:
        if disk.size(HISTORY_FILE) > FILE_BYTES_MAX:
            rows.trouble = "the history is too long to be written by a hub"
            return rows
        content = disk.read(HISTORY_FILE, 0, nbytes)
    except FileNotFoundError:
        rows.trouble = "no history in this folder: no hub has run there, or history_rows_max is 0"
        return rows
    except OSError as error:
        rows.trouble = f"the history cannot be read: {error.strerror or error}"
        return rows
    found = scan(content)
    rows.trouble = found.trouble
    if sum(place.rows for place in found.places) > ROWS_READ_MAX:
        rows.trouble = "the history has more rows than a hub writes"
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
    """Return an error message about the file's header.

    The result is empty if the header is torn, and `None` if it is valid.
    """
    if len(view) < _FILE_HEADER.size:
        return ""  # a torn write
    magic, version, digest = _FILE_HEADER.unpack_from(view)
    if magic != _MAGIC or digest != checksum(view[:12]):
        return "damaged at byte 0"
    if version != FORMAT:
        return f"it has format {version}, but this edgeasync reads format {FORMAT}"
    return None


def _block_at(view: memoryview, start: int) -> BlockPlace | None:
    """Return the block that starts at `start`, or `None` if it is incomplete."""
    if start + _BLOCK_HEADER.size > len(view):
        return None
    magic, nbytes, rows, synced, digest = _BLOCK_HEADER.unpack_from(view, start)
    body = start + _BLOCK_HEADER.size
    end = body + nbytes
    if magic != _BLOCK_MAGIC or end > len(view) or digest != checksum(view[start : body - 8], view[body:end]):
        return None
    return BlockPlace(start, end, rows, synced)
