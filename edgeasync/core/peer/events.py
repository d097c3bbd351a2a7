"""Events of a peer's core: messages, results of the work on arrays, and what people ask for."""

import msgspec

from edgeasync.protocol.peer_messages import PeerMessage, RoundId


class PeerReceived(msgspec.Struct, frozen=True, gc=False):
    """A message came under the key of `peer`.

    The payload of a `PeerPiece` has `payload_bytes` bytes. It is `sound` if it has the checksum that its header
    names. The core keeps it, if at all, by `StorePiece`, which is among the effects of this very event.
    """

    peer: str
    message: PeerMessage
    payload_bytes: int = 0
    sound: bool = True


class PeerReceivedMalformed(msgspec.Struct, frozen=True, gc=False):
    """A message came under the key of `peer` that cannot be read."""

    peer: str
    reason: str


Norms = tuple[float, float]
"""The L2 norm of the trained parameters, and that of the statistics."""


class SnapshotTaken(msgspec.Struct, frozen=True, gc=False):
    """The answer to `TakeSnapshot`: the norms of this member's own model."""

    round: RoundId
    norms: Norms = (0.0, 0.0)


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """The answer to `Encode`: the length and checksum of the payload."""

    round: RoundId
    step: int
    payload_bytes: int
    checksum: int


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """The answer to `Decode`: the norms of the payload.

    It is not `sound` if the whole has another checksum, or its codec refuses it.
    """

    round: RoundId
    step: int
    sound: bool = True
    norms: Norms = (0.0, 0.0)


class MeanApplied(msgspec.Struct, frozen=True, gc=False):
    """The answer to `ApplyMean`."""

    round: RoundId


class WorkFailed(msgspec.Struct, frozen=True, gc=False):
    """The answer to a work effect that this device could not carry out."""

    round: RoundId
    reason: str


class TrainingBegun(msgspec.Struct, frozen=True, gc=False):
    """The trainer takes its first step: from now on a round can be proposed to this peer."""


class RoundDue(msgspec.Struct, frozen=True, gc=False):
    """The trainer has taken the steps after which a round is due."""


class RoundHalfDue(msgspec.Struct, frozen=True, gc=False):
    """Since the last round began the trainer has taken half of the steps after which one is due."""


class PeersChanged(msgspec.Struct, frozen=True, gc=False):
    """The list of peers is another one, without this device itself."""

    peers: tuple[str, ...]


class PeerStopRequested(msgspec.Struct, frozen=True, gc=False):
    """The person who runs the device wants it to end.

    A round in progress loses this member. To end in order, wait until `PeerCore.round` is `None`: then nobody
    needs its payloads any more.
    """


WorkEvent = SnapshotTaken | Encoded | Decoded | MeanApplied | WorkFailed
LocalEvent = TrainingBegun | RoundDue | RoundHalfDue | PeersChanged | PeerStopRequested
PeerEvent = PeerReceived | PeerReceivedMalformed | LocalEvent | WorkEvent
