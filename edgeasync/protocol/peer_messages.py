"""The messages that peers exchange without a hub, as typed and bounded structs.

A field's order is its place on the wire; new fields may only be added at the end, with a default. The connection
says who sent a message: a key is an identity. No message says its sender's name.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgeasync.protocol.messages import PEERS_MAX, CodecName, Count, DeviceId, Frozen, Message, Unsigned64
from edgeasync.structs import resolve_type

ROUND_NUMBER_MAX = 2**62

ROUND_LEAP_MAX = 2**32
"""How far a round may lie ahead of those that a peer knows: nobody can use the numbers up at once."""

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
    """A round. The higher one of two wins: by number, then by the proposer's name and start."""

    number: RoundNumber
    proposer: DeviceId
    incarnation: Count


class RoundMember(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A member of a round: a peer, and which of its starts."""

    name: DeviceId
    incarnation: Count


class PeerPing(Message, frozen=True, gc=False):
    """To every peer: I am alive, this is where I stand.

    `incarnation` grows with every start, `count` with every ping of a start: an older ping does not count.
    `fingerprint` is of what all peers must have in common: the model's layout, and how they exchange. `number` is
    that of the highest round I know. I am `ready` for a round unless my trainer has yet to begin, or owes work to
    an earlier one. `heard` are the peers I have heard within a lease. `current` is the round I am in, `completed`
    the last one whose mean I have. A round is due every `round_every_s` or, if they are given, `round_steps`:
    all peers must agree on it. `frozen` is the checksum of my model's arrays that do not travel, `None` if I know
    of none.
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

    The members are in order of their names, which is their order in the ring. Every payload is coded by `codec`
    and travels in pieces of exactly `piece_bytes`, but for the last piece.
    """

    kind = 41
    round: RoundId
    topology: Topology
    codec: CodecName
    piece_bytes: Annotated[int, Meta(ge=1, le=PIECE_BYTES_MAX)]
    members: Annotated[tuple[RoundMember, ...], Meta(min_length=2, max_length=PEERS_MAX)]


class Offer(Message, frozen=True, gc=False):
    """Sender to receiver: my payload of this step is ready, with this length and checksum.

    I repeat it while no credit comes. Then it says that I have sent the first `sent_bytes`. A link keeps messages
    in order, so those of them that you do not hold are lost. A first offer says nothing of this.
    """

    kind = 42
    round: RoundId
    step: Step
    payload_bytes: Count
    checksum: Unsigned64
    sent_bytes: Count | None = None


class PeerCredit(Message, frozen=True, gc=False):
    """Receiver to sender: I hold the first `received_bytes` of this step's payload; send what follows.

    With `again` send it even if you have: it did not arrive.
    """

    kind = 43
    round: RoundId
    step: Step
    received_bytes: Count
    again: bool = False


class PeerPiece(Message, frozen=True, gc=False):
    """Sender to receiver: the bytes of this step's payload from `offset` on are in the payload frame."""

    kind = 44
    round: RoundId
    step: Step
    offset: Count
    checksum: Unsigned64


class Abandon(Message, frozen=True, gc=False):
    """To each other member: I give this round up. I waited for `awaited` at `step`; at step -1 for my own work.

    `ready` says, as in a ping, whether a round can be proposed to me.
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
