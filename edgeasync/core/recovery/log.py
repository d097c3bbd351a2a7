"""Entries of the log: the data of events that a replay needs.

An entry contains an input of the core, but not its effects. There are two exceptions: random
values, and the scalars of folds and norms, which another machine might round differently. Like the
core, an entry contains only digests of sessions and state ids.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from edgeasync.core.hub.effects import Fold, HubEffect
from edgeasync.core.hub.events import (
    Evaluated,
    Folded,
    Heard,
    HubEvent,
    HubReceived,
    HubReceivedMalformed,
    HubStopRequested,
    Moved,
    Peer,
    PushArrived,
    Resumed,
    Revoked,
    Ticked,
)  # fmt: skip
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.policies.transforms import Scalars
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Key

REMEDY = "use the version of edgeasync that wrote it, or resume from a checkpoint without the journal"


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="message", gc=False):
    """A `HubReceived` event, with its message as an encoded header frame."""

    peer: Peer
    header: bytes
    has_capacity: bool
    key: Key = b""
    moved: Moved = (0, 0)


class FoldScalars(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The scalars that the core computed for a `Fold`."""

    weights: tuple[float, ...]
    plan: tuple[Scalars, ...]
    scale: float


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event, the hub's time, the resulting version, and values that a replay cannot reproduce.

    `session` is the digest of the session that a `Hello` opened. `folds` are in the order in which
    the core decided them.
    """

    now_s: float
    event: (
        Frame
        | PushArrived
        | Heard
        | HubReceivedMalformed
        | Folded
        | Evaluated
        | Ticked
        | Resumed
        | Revoked
        | HubStopRequested
    )
    version: int
    session: bytes = b""
    folds: tuple[FoldScalars, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


class Log(Protocol):
    """The destination of a hub's entries, numbered from 1 over the whole run.

    Append the entry of an event before executing the effects of the event. Delay each message that
    confirms the event until `durable` has reached the number of the entry, and call `commit` while
    a message waits. The log calls the engine's `on_durable` when it has written more entries, and
    `on_failing` when a write fails.
    """

    @property
    def last(self) -> int:
        """The number of the entry that was appended last."""

    @property
    def durable(self) -> int:
        """The number of the last durable entry.

        This entry and all entries before it would survive a power cut.
        """

    @property
    def failing(self) -> str:
        """The reason why the log cannot be written at the moment, or ""."""

    @property
    def bytes_waiting(self) -> int:
        """The number of bytes in entries that are not durable yet."""

    @property
    def bytes_appended(self) -> int:
        """The number of bytes appended since the hub started."""

    def append(self, entry: bytes, payload: wire.Buffer | None, checksum: int | None = None) -> None:
        """Append an entry, which is written later. The caller must not change its payload.

        `checksum` is the payload's, if it is known.
        """

    def commit(self) -> None:
        """Make all entries appended so far durable as soon as possible, then notify the engine."""


def write_entry(
    event: HubEvent, now_s: float, effects: Sequence[HubEffect], version: int, session: bytes
) -> bytes:
    """Encode the entry of an event that the core has handled, with the scalars of its folds."""
    folds = tuple([FoldScalars(e.weights, e.plan, e.scale) for e in effects if isinstance(e, Fold)])
    if isinstance(event, HubReceived):
        frame = Frame(event.peer, wire.encode(event.message), event.has_capacity, event.key, event.moved)
        return _encode(Entry(now_s, frame, version, session, folds))
    return _encode(Entry(now_s, event, version, b"", folds))


def read_entry(content: wire.Buffer) -> Entry:
    """Decode an entry of a journal; raises `StorageError` if it is invalid."""
    try:
        return _decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StorageError(
            "cannot decode an entry of the journal, because another version of edgeasync wrote it "
            f"({error}); {REMEDY}"
        ) from error


def event_of(entry: Entry) -> HubEvent:
    """Return the event of an entry; raises `StorageError` if its message is invalid."""
    event = entry.event
    if not isinstance(event, Frame):
        return event
    try:
        message = wire.decode(event.header)
    except ProtocolError as error:
        raise StorageError(
            "cannot decode a message in the journal, because another version of edgeasync wrote it "
            f"({error}); {REMEDY}"
        ) from error
    return HubReceived(event.peer, message, event.has_capacity, event.key, event.moved)  # type: ignore[arg-type]
