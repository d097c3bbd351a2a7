"""The messages that peers exchange without a hub, as structs whose fields have types and bounds.

The fields of a struct are sent in the order in which it declares them. New fields may only be added
at the end, with a default. No message contains its sender, because the receiver identifies the
sender by the key of the connection.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgeasync.protocol.messages import PEERS_MAX, CodecName, Count, DeviceId, Frozen, Message, Unsigned64
from edgeasync.structs import resolve_type

ROUND_NUMBER_MAX = 2**62

ROUND_LEAP_MAX = 2**32
"""Maximum difference between a new round's number and the highest known one.

Otherwise a faulty peer could use up all round numbers.
"""

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
    """Identifies a round.

    Rounds are ordered by number, then by proposer, then by incarnation. Of two concurrent rounds,
    the higher one wins.
    """

    number: RoundNumber
    proposer: DeviceId
    incarnation: Count


class RoundMember(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A member of a round, identified by the peer's name and its incarnation."""

    name: DeviceId
    incarnation: Count


class PeerPing(Message, frozen=True, gc=False):
    """Peer to every other peer: I am alive, and this is my state.

    `incarnation` increases with every start of the peer, and `count` with every ping since that
    start. Receivers ignore a ping that is older than one they have received. `fingerprint` covers
    the settings that all peers must share: the model's layout, and how they exchange payloads.
    `number` is the highest round number that I know. I am `ready` for a round unless my trainer has
    not started yet or still has to take steps for an earlier round. `heard` lists the peers from
    which I received a ping within the last lease. `current` is the round in which I take part, and
    `completed` is the last round whose mean I have received. A new round is due every
    `round_every_s` seconds or, if it is set, every `round_steps` steps. These two settings must be
    equal on all peers. `frozen` is the checksum of my model's frozen arrays; it is `None` if
    unknown.
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
    """Proposer to each member: take a snapshot, and average it with the other members' snapshots.

    The members are sorted by name, which is also their order in the ring. Every payload is encoded
    with `codec` and sent in pieces of exactly `piece_bytes` bytes, except that the last piece may
    be shorter.
    """

    kind = 41
    round: RoundId
    topology: Topology
    codec: CodecName
    piece_bytes: Annotated[int, Meta(ge=1, le=PIECE_BYTES_MAX)]
    members: Annotated[tuple[RoundMember, ...], Meta(min_length=2, max_length=PEERS_MAX)]


class Offer(Message, frozen=True, gc=False):
    """Sender to receiver: my payload for this step is ready, with this length and checksum.

    I repeat the offer until a credit arrives. In a repeated offer, `sent_bytes` is the number of
    bytes that I have already sent. A link preserves the order of messages. So if some of these
    bytes have not arrived before the offer, they are lost. In the first offer, `sent_bytes` is
    `None`.
    """

    kind = 42
    round: RoundId
    step: Step
    payload_bytes: Count
    checksum: Unsigned64
    sent_bytes: Count | None = None


class PeerCredit(Message, frozen=True, gc=False):
    """Receiver to sender: I have the first `received_bytes` of this step's payload; send the rest.

    If `again` is true, resend bytes that you have already sent, because they did not arrive.
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

    I abandon it because I was waiting for the peer `awaited` at `step`. If `step` is -1, I was
    waiting for my own trainer. As in a ping, `ready` reports whether I can start a new round.
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
