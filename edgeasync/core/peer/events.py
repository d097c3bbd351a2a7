"""Events of a peer's core: messages, results of work, and people's requests."""

import msgspec

from edgeasync.protocol.peer_messages import PeerMessage, RoundId


class PeerReceived(msgspec.Struct, frozen=True, gc=False):
    """A message arrived under the key of `peer`.

    The payload of a `PeerPiece` has `payload_bytes` bytes. It is `sound` if its checksum matches
    its header. To store it, the core returns `StorePiece` for this event.
    """

    peer: str
    message: PeerMessage
    payload_bytes: int = 0
    sound: bool = True


class PeerReceivedMalformed(msgspec.Struct, frozen=True, gc=False):
    """A message arrived under the key of `peer` that cannot be decoded."""

    peer: str
    reason: str


Norms = tuple[float, float]
"""The L2 norms of the trained parameters and of the statistics."""


class SnapshotTaken(msgspec.Struct, frozen=True, gc=False):
    """The answer to `TakeSnapshot`, with the norms of this member's own model."""

    round: RoundId
    norms: Norms = (0.0, 0.0)


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """The answer to `Encode`, with the payload's size and checksum."""

    round: RoundId
    step: int
    payload_bytes: int
    checksum: int


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """The answer to `Decode`, with the norms of the payload.

    It is not `sound` if its checksum is wrong, or its codec cannot decode it.
    """

    round: RoundId
    step: int
    sound: bool = True
    norms: Norms = (0.0, 0.0)


class MeanApplied(msgspec.Struct, frozen=True, gc=False):
    """The answer to `ApplyMean`."""

    round: RoundId


class WorkFailed(msgspec.Struct, frozen=True, gc=False):
    """The answer to a work effect that this device could not execute."""

    round: RoundId
    reason: str


class TrainingBegun(msgspec.Struct, frozen=True, gc=False):
    """The trainer takes its first step: the peer may now join rounds."""


class RoundDue(msgspec.Struct, frozen=True, gc=False):
    """The trainer has taken the steps after which a round is due."""


class RoundHalfDue(msgspec.Struct, frozen=True, gc=False):
    """The trainer has taken half of the steps after which a round is due."""


class PeersChanged(msgspec.Struct, frozen=True, gc=False):
    """The list of peers has changed; it does not contain this device itself."""

    peers: tuple[str, ...]


class PeerStopRequested(msgspec.Struct, frozen=True, gc=False):
    """A person requested the peer's end.

    A round in progress loses this member. For a clean end, wait until `PeerCore.round` is `None`,
    so that nobody needs its payloads any more.
    """


WorkEvent = SnapshotTaken | Encoded | Decoded | MeanApplied | WorkFailed
LocalEvent = TrainingBegun | RoundDue | RoundHalfDue | PeersChanged | PeerStopRequested
PeerEvent = PeerReceived | PeerReceivedMalformed | LocalEvent | WorkEvent
