"""Effects of a peer's core, which the runtime or a simulator executes in order.

The runtime stores the arrays of a round: the snapshot, a sum of the same length that is divided
into segments, and at most one outgoing and one incoming payload per step. `DropRound` drops all of
them.

*Work* effects may be slow. Exactly one event answers each of them, even if the round was dropped in
the meantime. The core joins no other round until all work of a round is answered, so the arrays of
two rounds never exist at the same time.
"""

from typing import Literal

import msgspec

from edgeasync.protocol.peer_messages import PeerMessage, Propose, RoundId


class SendToPeer(msgspec.Struct, frozen=True, gc=False):
    """Send a message without payload. It may be lost; the core repeats important messages."""

    peer: str
    message: PeerMessage


class SendPiece(msgspec.Struct, frozen=True, gc=False):
    """Send `length` bytes of the outgoing payload of `step`, starting at `offset`."""

    peer: str
    round: RoundId
    step: int
    offset: int
    length: int


class TakeSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Work: copy the model between two local steps, then report `SnapshotTaken`.

    The model is divided into `segments` segments of almost equal length: segment i is `[i * length
    // segments, (i + 1) * length // segments)`. In a ring, the sum is initialized with the
    snapshot. In an all-to-all exchange, it is initialized with zeros, and has one segment.
    """

    round: RoundId
    proposal: Propose
    segments: int


class Encode(msgspec.Struct, frozen=True, gc=False):
    """Work: encode a segment as the outgoing payload of `step`, then report `Encoded`.

    `"sum"` encodes the segment of the sum, and `"snapshot"` the segment of the snapshot. `"mean"`
    divides the sum's segment by the number of members, and encodes the result. The decoded payload
    then replaces the segment, as it does at the other members.
    """

    round: RoundId
    step: int
    segment: int
    source: Literal["sum", "snapshot", "mean"]


class ForwardPayload(msgspec.Struct, frozen=True, gc=False):
    """Reuse the incoming payload of `received_step` as the outgoing payload of `step`.

    The bytes are the same. No event answers this effect.
    """

    round: RoundId
    step: int
    received_step: int


class OpenPayload(msgspec.Struct, frozen=True, gc=False):
    """Allocate a buffer for the incoming payload of `step`. No event answers this effect."""

    round: RoundId
    step: int
    payload_bytes: int
    checksum: int


class StorePiece(msgspec.Struct, frozen=True, gc=False):
    """Copy the payload of the message into the incoming payload of `step`.

    No event answers this effect.
    """

    round: RoundId
    step: int
    offset: int


class Decode(msgspec.Struct, frozen=True, gc=False):
    """Work: decode a payload into a segment of the sum, then report `Decoded`.

    `"add"` adds the payload to the segment. `"replace"` replaces the segment, because the payload
    is the mean. If `own` is set, the outgoing payload of `step` is decoded, so that a member's own
    values are rounded like those of the other members.
    """

    round: RoundId
    step: int
    segment: int
    way: Literal["add", "replace"]
    own: bool = False


class ReleasePayload(msgspec.Struct, frozen=True, gc=False):
    """Drop a payload of `step` that is no longer needed. No event answers this effect."""

    round: RoundId
    step: int
    incoming: bool


class ApplyMean(msgspec.Struct, frozen=True, gc=False):
    """Work: apply the mean between two local steps, then report `MeanApplied`.

    The mean minus the snapshot is added to the model. In a ring, the sum already is the mean. In an
    all-to-all exchange, it is first divided by the number of members. The outgoing payloads are
    kept, since other members may still need them.
    """

    round: RoundId


class DropRound(msgspec.Struct, frozen=True, gc=False):
    """Drop the arrays and payloads of a round once no work uses them.

    No event answers this effect.
    """

    round: RoundId


ReportName = Literal[
    "alone",
    "peer_found",
    "peer_lost",
    "refused",
    "round_abandoned",
    "round_done",
    "round_started",
    "stopped",
    "warning",
]


class PeerReport(msgspec.Struct, frozen=True, gc=False):
    """Report an event to the user of the device."""

    event: ReportName
    detail: str = ""
    peer: str = ""


class EndPeer(msgspec.Struct, frozen=True, gc=False):
    """End after all sent messages were transmitted."""

    reason: str


WorkEffect = TakeSnapshot | Encode | Decode | ApplyMean
PeerEffect = (
    SendToPeer
    | SendPiece
    | WorkEffect
    | ForwardPayload
    | OpenPayload
    | StorePiece
    | ReleasePayload
    | DropRound
    | PeerReport
    | EndPeer
)
