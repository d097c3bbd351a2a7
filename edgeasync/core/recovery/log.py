"""Entries of the log: the data of events that a replay needs.

An entry contains an input of the core, not its consequences, with two exceptions: random values,
and the scalars of folds and norms, which another machine might round differently. Like the core, it
contains only digests of sessions and state ids.
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
    """A `HubReceived`, with its message as an encoded header frame."""

    peer: Peer
    header: bytes
    has_capacity: bool
    key: Key = b""
    moved: Moved = (0, 0)


class FoldScalars(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The scalars that the core chose for a `Fold`."""

    weights: tuple[float, ...]
    plan: tuple[Scalars, ...]
    scale: float


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event, the hub's time, the resulting version, and non-reproducible values.

    `session` is the digest of the session opened by a `Hello`. `folds` are in the order of the
    decisions.
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
    """The destination of a hub's entries, numbered from 1 over a run's whole life.

    Append the entry of an event before executing its effects. Hold back each message that confirms
    the event until `durable` has reached the entry's number, and call `commit` while one waits. The
    log calls the engine's `on_durable` when it has written more, and `on_failing` when a write
    fails.
    """

    @property
    def last(self) -> int:
        """The number of the last appended entry."""

    @property
    def durable(self) -> int:
        """The last entry that, with all before it, would survive a power cut."""

    @property
    def failing(self) -> str:
        """Why the log cannot be written at the moment, or ""."""

    @property
    def bytes_waiting(self) -> int:
        """Bytes of entries that are not durable yet."""

    @property
    def bytes_appended(self) -> int:
        """Bytes appended since the hub started."""

    def append(self, entry: bytes, payload: wire.Buffer | None) -> None:
        """Append an entry, which is written later; its payload must not change."""

    def commit(self) -> None:
        """Make all entries so far durable as soon as possible, and notify the engine."""


def write_entry(
    event: HubEvent, now_s: float, effects: Sequence[HubEffect], version: int, session: bytes
) -> bytes:
    """Encode the entry of an event that the core has handled, with its folds' scalars."""
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
            f"cannot decode an entry of the journal, which another version wrote ({error}); {REMEDY}"
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
            f"cannot decode a message in the journal, which another version wrote ({error}); {REMEDY}"
        ) from error
    return HubReceived(event.peer, message, event.has_capacity, event.key, event.moved)  # type: ignore[arg-type]
