"""What the hub writes down of every event, so that the same core makes the same state of it again.

An entry is an input of the core, not what became of it, with three exceptions: what was drawn at random, and the
scalars of folds and norms, which another machine might round in another way.
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
    Key,
    Malformed,
    Peer,
    PushArrived,
    Received,
    Resumed,
    Revoked,
    StopRequested,
    Ticked,
)  # fmt: skip
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.policies.transforms import Scalars
from edgeasync.protocol import wire

REMEDY = "start the version of edgeasync that wrote it, or go on from a checkpoint alone"


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="message", gc=False):
    """A `Received`, its message as the header frame that carried it."""

    peer: Peer
    header: bytes
    has_capacity: bool
    key: Key = b""


class FoldScalars(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a `Fold` was decided to be."""

    weights: tuple[float, ...]
    plan: tuple[Scalars, ...]
    scale: float


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event, the hub's time, the version after it, and what cannot be computed again.

    `session` is what a hello was given; `folds` are in the order they were decided in.
    """

    now_s: float
    event: (
        Frame | PushArrived | Heard | Malformed | Folded | Evaluated | Ticked | Resumed | Revoked | StopRequested
    )
    version: int
    session: bytes = b""
    folds: tuple[FoldScalars, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


class Log(Protocol):
    """Where a hub's entries go. Numbers count up from 1 over the whole life of a run."""

    @property
    def last(self) -> int:
        """The number of the last entry appended."""

    @property
    def durable(self) -> int:
        """Every entry up to this number would outlive a power cut."""

    @property
    def failing(self) -> str:
        """Why nothing can be written at the moment; empty while all is well."""

    @property
    def bytes_waiting(self) -> int:
        """Bytes of entries that are not durable yet."""

    @property
    def bytes_appended(self) -> int:
        """Bytes of all entries since the hub was started."""

    def append(self, entry: bytes, payload: wire.Buffer | None) -> None:
        """Take an entry in, to be written some time."""

    def commit(self) -> None:
        """Make every entry so far durable as soon as can be, and tell when they are."""


def write_entry(
    event: HubEvent, now_s: float, effects: Sequence[HubEffect], version: int, session: bytes
) -> bytes:
    """Return the entry of an event that the core has taken in, with what it made of it."""
    folds = tuple([FoldScalars(e.weights, e.plan, e.scale) for e in effects if isinstance(e, Fold)])
    if isinstance(event, Received):
        frame = Frame(event.peer, wire.encode(event.message), event.has_capacity, event.key)
        return _encode(Entry(now_s, frame, version, session, folds))
    return _encode(Entry(now_s, event, version, b"", folds))


def read_entry(content: wire.Buffer) -> Entry:
    """Read an entry; raises `StorageError` for what is none."""
    try:
        return _decode(content)
    except (msgspec.DecodeError, ValueError) as error:
        raise StorageError(
            f"an entry of the journal cannot be read ({error}): another version wrote it"
        ) from error


def event_of(entry: Entry) -> HubEvent:
    """Return the event that an entry was written for; raises `StorageError` if its message cannot be read."""
    event = entry.event
    if not isinstance(event, Frame):
        return event
    try:
        message = wire.decode(event.header)
    except ProtocolError as error:
        raise StorageError(
            f"a message in the journal cannot be read ({error}): another version wrote it"
        ) from error
    return Received(event.peer, message, event.has_capacity, event.key)  # type: ignore[arg-type]
