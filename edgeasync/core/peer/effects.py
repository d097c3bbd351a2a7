"""Effects of a peer's core. The runtime or a simulator carries them out in order.

They hold the arrays. For a round these are the snapshot, a sum of the same length cut into segments, and payloads:
one outgoing and one incoming at most for each step. `DropRound` ends all of that.

*Work* effects may take long. Each is answered by exactly one event, also after the round was dropped. Until all
work of a round has been answered the core takes part in no other, so there are never the arrays of two.
"""

from typing import Literal

import msgspec

from edgeasync.protocol.peer_messages import PeerMessage, Propose, RoundId


class SendToPeer(msgspec.Struct, frozen=True, gc=False):
    """Send a message without payload. It may be lost: whatever matters is repeated."""

    peer: str
    message: PeerMessage


class SendPiece(msgspec.Struct, frozen=True, gc=False):
    """Send a `PeerPiece` with `length` bytes from `offset` on of the outgoing payload of `step`."""

    peer: str
    round: RoundId
    step: int
    offset: int
    length: int


class TakeSnapshot(msgspec.Struct, frozen=True, gc=False):
    """Work: copy the model between two local steps, then report `SnapshotTaken`.

    The model is cut into `segments` nearly equal ones: segment i is `[i * length // segments, (i + 1) * length //
    segments)`. In a ring the sum begins as the snapshot, in all-to-all as zeros with one segment.
    """

    round: RoundId
    proposal: Propose
    segments: int


class Encode(msgspec.Struct, frozen=True, gc=False):
    """Work: code a segment as the outgoing payload of `step`, then report `Encoded`.

    `"sum"` codes the sum's segment, `"snapshot"` that of the snapshot. `"mean"` divides that of the sum by
    the number of members, codes it, and puts in the segment's place what the payload decodes to, as others will.
    """

    round: RoundId
    step: int
    segment: int
    source: Literal["sum", "snapshot", "mean"]


class ForwardPayload(msgspec.Struct, frozen=True, gc=False):
    """Let the incoming payload of `received_step` be the outgoing payload of `step`, to the byte. No answer."""

    round: RoundId
    step: int
    received_step: int


class OpenPayload(msgspec.Struct, frozen=True, gc=False):
    """Make a buffer of `payload_bytes` for the incoming payload of `step`. No answer."""

    round: RoundId
    step: int
    payload_bytes: int
    checksum: int


class StorePiece(msgspec.Struct, frozen=True, gc=False):
    """Copy the payload of the message that is being handled into the incoming payload of `step`. No answer."""

    round: RoundId
    step: int
    offset: int


class Decode(msgspec.Struct, frozen=True, gc=False):
    """Work: check and decode the incoming payload of `step` into a segment of the sum, then report `Decoded`.

    `"add"` adds it; `"replace"` puts it in the segment's place, because it is the mean. With `own` it is the
    outgoing payload of `step` that is decoded: so a member counts itself as the others count it.
    """

    round: RoundId
    step: int
    segment: int
    way: Literal["add", "replace"]
    own: bool = False


class ReleasePayload(msgspec.Struct, frozen=True, gc=False):
    """Drop a payload of `step` that nobody needs any more. No answer."""

    round: RoundId
    step: int
    incoming: bool


class ApplyMean(msgspec.Struct, frozen=True, gc=False):
    """Work: add the mean less the snapshot to the model between two local steps, then report `MeanApplied`.

    In a ring the sum already is the mean; in all-to-all it is divided by the number of members first. The outgoing
    payloads stay: others may still need them.
    """

    round: RoundId


class DropRound(msgspec.Struct, frozen=True, gc=False):
    """Drop the round's arrays and payloads, as soon as no work on them is left. No answer."""

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
    """Tell the person at the device what happened."""

    event: ReportName
    detail: str = ""
    peer: str = ""


class EndPeer(msgspec.Struct, frozen=True, gc=False):
    """End, after what was sent last has left."""

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
