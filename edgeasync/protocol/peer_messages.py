"""The messages that peers exchange without a hub, as typed and bounded structs.

The order of the fields is their order on the wire. New fields may only be added at the end, with a
default. The sender of a message follows from the key of its connection, so no message contains it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgeasync.protocol.messages import PEERS_MAX, CodecName, Count, DeviceId, Frozen, Message, Unsigned64
from edgeasync.structs import resolve_type

ROUND_NUMBER_MAX = 2**62

ROUND_LEAP_MAX = 2**32
"""How far a round's number may exceed the known ones, so that nobody can exhaust the numbers."""

STEPS_MAX = 2 * PEERS_MAX

PIECE_BYTES_MAX = 1 << 24

RoundNumber = Annotated[int, Meta(ge=0, le=ROUND_NUMBER_MAX)]
Step = Annotated[int, Meta(ge=0, lt=STEPS_MAX)]
Names = Annotated[tuple[DeviceId, ...], Meta(max_length=PEERS_MAX)]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")]
Topology = Literal["ring", "all_to_all"]
AbandonReason = Literal[
    "corrupt", "early", "failed", "left", "left_out", "lost", "preempted", "stalled", "unknown_member"
]  # fmt: skip


class RoundId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A round. Of two rounds the higher one wins: by number, then by proposer and incarnation."""

    number: RoundNumber
    proposer: DeviceId
    incarnation: Count


class RoundMember(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A member of a round: a peer and its incarnation."""

    name: DeviceId
    incarnation: Count


class PeerPing(Message, frozen=True, gc=False):
    """To every peer: I am alive, and this is my state.

    `incarnation` grows with every start, `count` with every ping of a start. An older ping is
    ignored. `fingerprint` covers what all peers must have in common: the model's layout, and how
    they exchange. `number` is that of the highest round I know. I am `ready` for a round unless my
    trainer has yet to begin, or owes steps to an earlier round. `heard` are the peers I have heard
    within a lease. `current` is my current round, `completed` the last one whose mean I have. A
    round is due every `round_every_s` or, if set, every `round_steps`; all peers must have the same
    value. `frozen` is the checksum of my model's frozen arrays, `None` if unknown.
    """

    kind = 40
    incarnation: Count
    count: Count
    fingerprint: Fingerprint
    number: RoundNumber
    ready: bool
    heard: Names
    current: RoundId | None = None
    completed: RoundId | None = None
    leaving: bool = False
    frozen: Frozen | None = None
    round_every_s: float = 1.0
    round_steps: Count | None = None


class Propose(Message, frozen=True, gc=False):
    """Proposer to each member: take a snapshot, and average it with the others'.

    The members are sorted by name, which is their order in the ring. Every payload is encoded with
    `codec` and sent in pieces of exactly `piece_bytes`, except for the last piece.
    """

    kind = 41
    round: RoundId
    topology: Topology
    codec: CodecName
    piece_bytes: Annotated[int, Meta(ge=1, le=PIECE_BYTES_MAX)]
    members: Annotated[tuple[RoundMember, ...], Meta(min_length=2, max_length=PEERS_MAX)]


class Offer(Message, frozen=True, gc=False):
    """Sender to receiver: my payload of this step is ready, with this length and checksum.

    I repeat the offer until a credit arrives. A repeated offer tells that I have sent the first
    `sent_bytes`. A link keeps messages in order, so those of them that have not arrived are lost.
    In the first offer, `sent_bytes` is `None`.
    """

    kind = 42
    round: RoundId
    step: Step
    payload_bytes: Count
    checksum: Unsigned64
    sent_bytes: Count | None = None


class PeerCredit(Message, frozen=True, gc=False):
    """Receiver to sender: I have the first `received_bytes` of this step's payload; send the rest.

    With `again`, send it even if you have already sent it, because it did not arrive.
    """

    kind = 43
    round: RoundId
    step: Step
    received_bytes: Count
    again: bool = False


class PeerPiece(Message, frozen=True, gc=False):
    """Sender to receiver: the payload frame contains this step's payload from `offset` on."""

    kind = 44
    round: RoundId
    step: Step
    offset: Count
    checksum: Unsigned64


class Abandon(Message, frozen=True, gc=False):
    """To each other member: I abandon this round.

    I waited for `awaited` at `step`, or for my own work if `step` is -1. As in a ping, `ready`
    tells whether I accept a new round.
    """

    kind = 45
    round: RoundId
    reason: AbandonReason
    step: Annotated[int, Meta(ge=-1, lt=STEPS_MAX)] = 0
    awaited: Names = ()
    ready: bool = False


PeerMessage = PeerPing | Propose | Offer | PeerCredit | PeerPiece | Abandon

PEER_MESSAGES: dict[int, type[Message]] = {
    message.kind: resolve_type(message) for message in (PeerPing, Propose, Offer, PeerCredit, PeerPiece, Abandon)
}
