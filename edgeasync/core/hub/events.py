"""What happens to the hub: the inputs of `HubCore`. One event for every message, plus time and what people want.

`peer` is the connection a message came on, an opaque routing id. Some events carry what the engine knows of its
memory: `has_capacity`, `can_answer` and `can_send` say whether there is enough for what the event leads to.
"""

import msgspec

from edgeasync.protocol.messages import Fetch, FetchGraph, Hello, Leave, Ping, Push, StatusRequest

Peer = bytes

Key = bytes
"""The public key that a message came under; empty where there are no keys."""


class Received(msgspec.Struct, frozen=True, gc=False):
    """A whole message came in that carries no payload; a `Push` here announces a transfer in pieces.

    `has_capacity`: a `Push` may be received, the answer to a `Fetch` or `FetchGraph` may be sent.
    """

    peer: Peer
    message: Hello | Fetch | FetchGraph | Push | Ping | Leave | StatusRequest
    has_capacity: bool = True
    key: Key = b""


class PushArrived(msgspec.Struct, frozen=True, array_like=True, tag="push", gc=False):
    """A push is here with its whole payload, which had the right length and checksum.

    `handle` names the payload; `norm` is the L2 norm of what it decodes to, not finite if any value's square,
    in float32, is not. `can_answer`: the update may be held, unless it came in pieces and is, and the model may be
    sent in answer.
    """

    peer: Peer
    push: Push
    handle: int
    norm: float
    can_answer: bool = True
    key: Key = b""


class Heard(msgspec.Struct, frozen=True, array_like=True, tag="heard", gc=False):
    """A piece or a credit came in that belongs to a transfer: a sign of life."""

    peer: Peer
    kind: str
    key: Key = b""


class Malformed(msgspec.Struct, frozen=True, array_like=True, tag="malformed"):
    """A message came in that cannot be read, or whose payload is not what it was announced to be."""

    peer: Peer
    reason: str
    strike: bool = True
    key: Key = b""


class Folded(msgspec.Struct, frozen=True, array_like=True, tag="folded", gc=False):
    """A version is made; `norm` is the L2 norm of the weighted sum of its updates."""

    number: int
    norm: float


class Evaluated(msgspec.Struct, frozen=True, array_like=True, tag="evaluated", gc=False):
    """A version was evaluated on held-out data: mean loss, and accuracy from 0 to 1 where there is one."""

    number: int
    loss: float
    accuracy: float | None


class Ticked(msgspec.Struct, frozen=True, array_like=True, tag="tick", gc=False):
    """Time has passed, and something may be due. `can_send`: the model may be sent to those that wait for it."""

    can_send: bool = True


class Resumed(msgspec.Struct, frozen=True, array_like=True, tag="resumed"):
    """The hub was away, or stood still, and resumes: no device could be heard meanwhile.

    With a `lineage` versions belong to that from now on, those before it to both.
    """

    lineage: str = ""


class Revoked(msgspec.Struct, frozen=True, array_like=True, tag="revoked", gc=False):
    """A key counts no more: what it has here ends."""

    key: Key


class StopRequested(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The person who runs the hub wants it to end."""


HubEvent = (
    Received | PushArrived | Heard | Malformed | Folded | Evaluated | Ticked | Resumed | Revoked | StopRequested
)
