"""The history of a run: one row for each update that the hub decided about, and for each evaluation.

The file `history` is a header and blocks, which are appended. A block is a header and a msgpack array of some
hundred rows, deflated. It stands for itself but for the names of devices, which are told once, and for outcomes:
what became of an update that waited is in a later block, as a correction. So who reads or copies the file while a
hub writes it has all blocks up to one that is not whole.

`docs/reference/files.md` describes every byte.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from edgeasync.durable.disk import ReadableDisk
from edgeasync.errors import StorageError
from edgeasync.protocol.wire import Buffer, checksum

HISTORY_FILE = "history"

FORMAT = 1

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
_BLOCK_HEADER = struct.Struct("<4sIIQQdQQQ")
_DEFLATE_LEVEL = 1


_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class UpdateRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An update, but for its device.

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
    number: _Count
    outcome: str
    loss: float | None
    staleness: _Count | None
    local_steps: _Count
    examples: _Count
    nbytes: _Count
    metrics: dict[str, float] | None = None


class EvaluationRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An evaluation of a version; `row` counts them."""

    row: _Count
    entry: _Count
    time_s: float
    version: _Count
    loss: float
    accuracy: float | None


class Correction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of an update that waited: the outcome of an earlier `row` from then on."""

    row: _Count
    entry: _Count
    time_s: float
    outcome: str


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Some rows. `places` says of each update where its device is in the names told so far, from 0.

    Of these the first `known` still hold, and `devices` are those behind them. `corrections` are of rows of this
    block or earlier ones, and do not count as rows.
    """

    known: _Count
    devices: list[str]
    places: list[_Count]
    updates: list[UpdateRow]
    evaluations: list[EvaluationRow]
    corrections: list[Correction] = []


class Last(msgspec.Struct, frozen=True):
    """Entry and time of a row, and how many updates and evaluations there were in the run by then."""

    entry: int = 0
    time_s: float = 0.0
    updates: int = 0
    evaluations: int = 0


class BlockPlace(msgspec.Struct, frozen=True):
    """Where a block lies in the file, how many rows it has, and the last of them.

    `synced` bytes of the file would have outlived a power cut when it was written.
    """

    start: int
    end: int
    rows: int
    synced: int
    last: Last


class Rows(msgspec.Struct):
    """Updates, the device of each, and evaluations, in their order; `trouble` says why there may be fewer."""

    devices: list[str] = []
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
_decode = msgspec.msgpack.Decoder(Block).decode


def write_block(block: Block, last: Last, synced: int) -> bytes:
    """Return a block's bytes; `synced` bytes of the file before it would outlive a power cut."""
    body = zlib.compress(_encode(block), _DEFLATE_LEVEL)
    rows = len(block.updates) + len(block.evaluations)
    fields = (len(body), rows, synced, last.entry, last.time_s, last.updates, last.evaluations)
    header = _BLOCK_HEADER.pack(_BLOCK_MAGIC, *fields, 0)[:-8]
    return header + checksum(header, body).to_bytes(8, "little") + body


def last_of(block: Block, before: Last) -> Last:
    """Return what a block's header says of its last row; `before` is of the block before."""
    update, evaluation = block.updates[-1:], block.evaluations[-1:]
    ends: list[UpdateRow | EvaluationRow | Correction] = [*update, *evaluation, *block.corrections[-1:]]
    return Last(
        max((row.entry for row in ends), default=before.entry),
        max((row.time_s for row in ends), default=before.time_s),
        update[0].row if update else before.updates,
        evaluation[0].row if evaluation else before.evaluations,
    )


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


def blocks(content: Buffer, places: list[BlockPlace], names: list[str]) -> Iterator[tuple[list[str], Block]]:
    """Yield blocks with the name of each update's device; raises `StorageError` for what no hub has written.

    The `names` that were told by the last block stay in the list, which is empty at first.
    """
    view = memoryview(content)
    for place in places:
        inflate = zlib.decompressobj()
        try:
            block = _decode(
                inflate.decompress(view[place.start + _BLOCK_HEADER.size : place.end], BLOCK_BYTES_MAX)
            )
            names[block.known :] = block.devices
            devices = [names[number] for number in block.places]
        except (zlib.error, msgspec.DecodeError, ValueError, IndexError) as error:
            raise StorageError(f"damaged at byte {place.start}: {error}") from error
        if len(devices) != len(block.updates) or place.rows != len(devices) + len(block.evaluations):
            raise StorageError(f"damaged at byte {place.start}: its rows are not as many as it says")
        yield devices, block


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
        for devices, block in blocks(content, found.places, []):
            rows.devices += devices
            rows.updates += block.updates
            rows.evaluations += block.evaluations
            corrected |= {one.row: one.outcome for one in block.corrections}
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
    magic, nbytes, rows, synced, entry, time_s, updates, evaluations, digest = _BLOCK_HEADER.unpack_from(
        view, start
    )
    body = start + _BLOCK_HEADER.size
    end = body + nbytes
    if magic != _BLOCK_MAGIC or end > len(view) or digest != checksum(view[start : body - 8], view[body:end]):
        return None
    return BlockPlace(start, end, rows, synced, Last(entry, time_s, updates, evaluations))
