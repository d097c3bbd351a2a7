"""Effects of a peer's core, which the runtime or a simulator executes in order.

The runtime stores the arrays of a round: the snapshot, a sum of the same length cut into segments,
and at most one outgoing and one incoming payload per step. `DropRound` drops them all.

*Work* effects may be slow. Each is answered by exactly one event, also after the round was dropped.
The core joins no other round until all work of a round is answered, so there are never the arrays
of two rounds.
"""

from typing import Literal

import msgspec

from edgeasync.protocol.peer_messages import PeerMessage, Propose, RoundId


class SendToPeer(msgspec.Struct, frozen=True, gc=False):
    """Send a message without payload. It may be lost; important messages are repeated."""

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

    The model is cut into `segments` of almost equal length: segment i is `[i * length // segments,
    (i + 1) * length // segments)`. In a ring the sum starts as the snapshot; in all-to-all it
    starts as zeros, with one segment.
    """

    round: RoundId
    proposal: Propose
    segments: int


class Encode(msgspec.Struct, frozen=True, gc=False):
    """Work: encode a segment as the outgoing payload of `step`, then report `Encoded`.

    `"sum"` encodes the sum's segment, `"snapshot"` that of the snapshot. `"mean"` divides the sum's
    segment by the number of members and encodes it. It then replaces the segment by the decoded
    payload, as the other members do.
    """

    round: RoundId
    step: int
    segment: int
    source: Literal["sum", "snapshot", "mean"]


class ForwardPayload(msgspec.Struct, frozen=True, gc=False):
    """Reuse the incoming payload of `received_step` as the outgoing one of `step`.

    The bytes are the same. No answer.
    """

    round: RoundId
    step: int
    received_step: int


class OpenPayload(msgspec.Struct, frozen=True, gc=False):
    """Allocate a buffer for the incoming payload of `step`. No answer."""

    round: RoundId
    step: int
    payload_bytes: int
    checksum: int


class StorePiece(msgspec.Struct, frozen=True, gc=False):
    """Copy the message's payload into the incoming payload of `step`. No answer."""

    round: RoundId
    step: int
    offset: int


class Decode(msgspec.Struct, frozen=True, gc=False):
    """Work: decode a payload into a segment of the sum, then report `Decoded`.

    `"add"` adds it to the segment; `"replace"` replaces the segment, because the payload is the
    mean. With `own` the outgoing payload of `step` is decoded, so that a member counts itself as
    the others do.
    """

    round: RoundId
    step: int
    segment: int
    way: Literal["add", "replace"]
    own: bool = False


class ReleasePayload(msgspec.Struct, frozen=True, gc=False):
    """Drop a payload of `step` that is no longer needed. No answer."""

    round: RoundId
    step: int
    incoming: bool


class ApplyMean(msgspec.Struct, frozen=True, gc=False):
    """Work: apply the mean between two local steps, then report `MeanApplied`.

    This adds the mean minus the snapshot. In a ring the sum already is the mean; in all-to-all it
    is first divided by the number of members. The outgoing payloads stay, since others may still
    need them.
    """

    round: RoundId


class DropRound(msgspec.Struct, frozen=True, gc=False):
    """Drop the round's arrays and payloads once no work uses them. No answer."""

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
    """Report an event to the person at the device."""

    event: ReportName
    detail: str = ""
    peer: str = ""


class EndPeer(msgspec.Struct, frozen=True, gc=False):
    """End after sent messages have left."""

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
