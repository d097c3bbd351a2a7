"""Events of the hub's core: one for every message, and for results, time and people's requests.

`peer` is the connection that a message came on, an opaque routing id. `has_capacity`, `can_answer` and `can_send`
say whether the engine has memory for the effects of the event.
"""

import msgspec

from edgeasync.protocol.messages import (
    Fetch,
    FetchGraph,
    Goodbye,
    Hello,
    Key,
    Order,
    Ping,
    Push,
    StatusRequest,
    Wake,
)

Peer = bytes

Moved = tuple[int, int]
"""Bytes from a device and to it that the core has not counted yet."""


class HubReceived(msgspec.Struct, frozen=True, gc=False):
    """A whole message without payload arrived; a `Push` here announces a transfer in pieces.

    `has_capacity`: the push may be received, or the answer to a `Fetch` or `FetchGraph` may be sent.
    """

    peer: Peer
    message: Hello | Fetch | FetchGraph | Push | Ping | Goodbye | StatusRequest | Wake | Order
    has_capacity: bool = True
    key: Key = b""
    moved: Moved = (0, 0)


class PushArrived(msgspec.Struct, frozen=True, array_like=True, tag="push", gc=False):
    """A push arrived with its whole payload, which had the right length and checksum.

    `handle` names the payload. `norm` is the L2 norm of the update; it is not finite if the square of a value, in
    float32, is not. `can_answer`: the model may be sent in answer, and the update may be held. One that came in
    pieces may always be held.
    """

    peer: Peer
    push: Push
    handle: int
    norm: float
    can_answer: bool = True
    key: Key = b""
    moved: Moved = (0, 0)


class Heard(msgspec.Struct, frozen=True, array_like=True, tag="heard", gc=False):
    """A piece or a credit of a transfer arrived, some time after the lease was last renewed."""

    peer: Peer
    kind: str
    key: Key = b""
    moved: Moved = (0, 0)


class HubReceivedMalformed(msgspec.Struct, frozen=True, array_like=True, tag="malformed"):
    """A message arrived that cannot be read, or whose payload is not the announced one.

    With `strike` it counts against its sender.
    """

    peer: Peer
    reason: str
    strike: bool = True
    key: Key = b""


class Folded(msgspec.Struct, frozen=True, array_like=True, tag="folded", gc=False):
    """A version was made; `norm` is the L2 norm of the weighted sum of its updates."""

    number: int
    norm: float


class Evaluated(msgspec.Struct, frozen=True, array_like=True, tag="evaluated", gc=False):
    """A version was evaluated on held-out data: mean loss, and accuracy from 0 to 1 where there is one."""

    number: int
    loss: float
    accuracy: float | None


class Ticked(msgspec.Struct, frozen=True, array_like=True, tag="tick", gc=False):
    """Time has passed, and something may be due. `can_send`: the model may be sent to members that wait for it."""

    can_send: bool = True


class Resumed(msgspec.Struct, frozen=True, array_like=True, tag="resumed"):
    """The hub was away, or stood still, and resumes: it could hear no device meanwhile.

    With a `lineage` the hub was started: new versions belong to that lineage, and continue those before it.
    """

    lineage: str = ""


class Revoked(msgspec.Struct, frozen=True, array_like=True, tag="revoked", gc=False):
    """A key counts no more: what it has here ends."""

    key: Key


class HubStopRequested(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The person who runs the hub wants it to end; with `finished` training is over, and the devices end, too."""

    finished: bool = False


HubEvent = (
    HubReceived
    | PushArrived
    | Heard
    | HubReceivedMalformed
    | Folded
    | Evaluated
    | Ticked
    | Resumed
    | Revoked
    | HubStopRequested
)
