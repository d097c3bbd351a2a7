"""Entries of the log: what the hub writes down of every event, so that a replay gives the same state.

An entry holds an input of the core, not what follows from it, with three exceptions: values drawn at random, and
the scalars of folds and norms, which another machine might round differently. Of sessions and state ids it holds
digests, as the core does.
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

REMEDY = "start the version of edgeasync that wrote it, or resume from a checkpoint alone"


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="message", gc=False):
    """A `HubReceived`, with its message as an encoded header frame."""

    peer: Peer
    header: bytes
    has_capacity: bool
    key: Key = b""
    moved: Moved = (0, 0)


class FoldScalars(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The scalars that the core decided on for a `Fold`."""

    weights: tuple[float, ...]
    plan: tuple[Scalars, ...]
    scale: float


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event, the hub's time, the version after the event, and values that cannot be computed again.

    `session` is the digest of the session that a hello was given; `folds` are in the order in which they were
    decided.
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
    """Where a hub's entries go. They are numbered from 1 over the whole life of a run.

    Append the entry of an event before carrying out its effects. Keep each message that confirms the event until
    `durable` has reached the entry's number, and call `commit` while one waits. The log lets the engine know by
    `on_durable` when it has written more, and by `on_failing` when it cannot write.
    """

    @property
    def last(self) -> int:
        """The number of the last entry appended."""

    @property
    def durable(self) -> int:
        """The number of the last entry that would outlive a power cut, as all before it would."""

    @property
    def failing(self) -> str:
        """Why the log cannot be written at the moment; empty while it can."""

    @property
    def bytes_waiting(self) -> int:
        """How many bytes of entries are not durable yet."""

    @property
    def bytes_appended(self) -> int:
        """How many bytes were appended since the hub was started."""

    def append(self, entry: bytes, payload: wire.Buffer | None) -> None:
        """Append an entry, to be written at some time; its payload must not change."""

    def commit(self) -> None:
        """Make all entries so far durable as soon as possible, and tell the engine when they are."""


def write_entry(
    event: HubEvent, now_s: float, effects: Sequence[HubEffect], version: int, session: bytes
) -> bytes:
    """Return the entry of an event that the core has handled, with the scalars of its folds."""
    folds = tuple([FoldScalars(e.weights, e.plan, e.scale) for e in effects if isinstance(e, Fold)])
    if isinstance(event, HubReceived):
        frame = Frame(event.peer, wire.encode(event.message), event.has_capacity, event.key, event.moved)
        return _encode(Entry(now_s, frame, version, session, folds))
    return _encode(Entry(now_s, event, version, b"", folds))


def read_entry(content: wire.Buffer) -> Entry:
    """Read an entry of a journal; raises `StorageError` if it cannot be read."""
    try:
        return _decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
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
    return HubReceived(event.peer, message, event.has_capacity, event.key, event.moved)  # type: ignore[arg-type]
