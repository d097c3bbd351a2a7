"""Events of a peer's core: messages, results of work, and requests of users."""

import msgspec

from edgeasync.protocol.peer_messages import PeerMessage, RoundId


class PeerReceived(msgspec.Struct, frozen=True, gc=False):
    """A message was received under the key of `peer`.

    The payload of a `PeerPiece` has `payload_bytes` bytes. `sound` is set if the payload matches
    the checksum in the header. To store the payload, the core returns `StorePiece` for this event.
    """

    peer: str
    message: PeerMessage
    payload_bytes: int = 0
    sound: bool = True


class PeerReceivedMalformed(msgspec.Struct, frozen=True, gc=False):
    """A message that cannot be decoded was received under the key of `peer`."""

    peer: str
    reason: str


Norms = tuple[float, float]
"""The L2 norms of the trained parameters and of the statistics."""


class SnapshotTaken(msgspec.Struct, frozen=True, gc=False):
    """The answer to `TakeSnapshot`, with the norms of this member's own model."""

    round: RoundId
    norms: Norms = (0.0, 0.0)


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """The answer to `Encode`, with the size and the checksum of the payload."""

    round: RoundId
    step: int
    payload_bytes: int
    checksum: int


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """The answer to `Decode`, with the norms of the payload.

    `sound` is not set if the checksum is wrong, or the codec cannot decode the payload.
    """

    round: RoundId
    step: int
    sound: bool = True
    norms: Norms = (0.0, 0.0)


class MeanApplied(msgspec.Struct, frozen=True, gc=False):
    """The answer to `ApplyMean`."""

    round: RoundId


class WorkFailed(msgspec.Struct, frozen=True, gc=False):
    """The answer to a work effect that this device was not able to execute."""

    round: RoundId
    reason: str


class TrainingBegun(msgspec.Struct, frozen=True, gc=False):
    """The trainer is about to take its first step. From now on, the peer may join rounds."""


class RoundDue(msgspec.Struct, frozen=True, gc=False):
    """The trainer has taken the number of steps after which a round is due."""


class RoundHalfDue(msgspec.Struct, frozen=True, gc=False):
    """The trainer has taken half of the number of steps after which a round is due."""


class PeersChanged(msgspec.Struct, frozen=True, gc=False):
    """The list of peers has changed. It does not contain this device itself."""

    peers: tuple[str, ...]


class PeerStopRequested(msgspec.Struct, frozen=True, gc=False):
    """A user requested to end the peer.

    A round in progress loses this member. For a clean end, wait until `PeerCore.round` is `None`,
    so that no other member needs the payloads of this one.
    """


WorkEvent = SnapshotTaken | Encoded | Decoded | MeanApplied | WorkFailed
LocalEvent = TrainingBegun | RoundDue | RoundHalfDue | PeersChanged | PeerStopRequested
PeerEvent = PeerReceived | PeerReceivedMalformed | LocalEvent | WorkEvent
