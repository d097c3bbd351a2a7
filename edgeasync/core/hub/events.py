"""Events of the hub's core: messages, results, time and requests.

`peer` identifies the connection of a message by an opaque routing id. `has_capacity`, `can_answer`
and `can_send` report whether the engine has enough memory for the event's effects.
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
"""The numbers of bytes received from a device and sent to it since the core last counted them."""


class HubReceived(msgspec.Struct, frozen=True, gc=False):
    """A message without payload arrived; a `Push` announces a transfer in pieces.

    `has_capacity` reports whether the hub can receive the push, or answer the `Fetch` or
    `FetchGraph`.
    """

    peer: Peer
    message: Hello | Fetch | FetchGraph | Push | Ping | Goodbye | StatusRequest | Wake | Order
    has_capacity: bool = True
    key: Key = b""
    moved: Moved = (0, 0)


class PushArrived(msgspec.Struct, frozen=True, array_like=True, tag="push", gc=False):
    """A push arrived with its complete payload, whose length and checksum are valid.

    `handle` identifies the payload. `norm` is the L2 norm of the update. It is infinite or NaN if
    the square of a value overflows float32. `can_answer` reports whether the hub can send the model
    in the answer and buffer the update. An update that was received in pieces can always be
    buffered.
    """

    peer: Peer
    push: Push
    handle: int
    norm: float
    can_answer: bool = True
    key: Key = b""
    moved: Moved = (0, 0)


class Heard(msgspec.Struct, frozen=True, array_like=True, tag="heard", gc=False):
    """A piece or a credit arrived, some time after the lease was last renewed."""

    peer: Peer
    kind: str
    key: Key = b""
    moved: Moved = (0, 0)


class HubReceivedMalformed(msgspec.Struct, frozen=True, array_like=True, tag="malformed"):
    """A message arrived that cannot be decoded, or whose payload was not announced.

    If `strike` is set, the fault counts against its sender.
    """

    peer: Peer
    reason: str
    strike: bool = True
    key: Key = b""


class Folded(msgspec.Struct, frozen=True, array_like=True, tag="folded", gc=False):
    """A version was computed; `norm` is the L2 norm of the weighted sum of its updates."""

    number: int
    norm: float


class Evaluated(msgspec.Struct, frozen=True, array_like=True, tag="evaluated", gc=False):
    """A version was evaluated on held-out data.

    `loss` is the mean loss. `accuracy` is between 0 and 1, or `None` if the task has no classes.
    """

    number: int
    loss: float
    accuracy: float | None


class Ticked(msgspec.Struct, frozen=True, array_like=True, tag="tick", gc=False):
    """Time has passed, and something may be due.

    `can_send` reports whether the hub can send the model to the members that wait for it.
    """

    can_send: bool = True


class Resumed(msgspec.Struct, frozen=True, array_like=True, tag="resumed"):
    """The hub resumes after a restart or a stall, during which it received no messages.

    If `lineage` is set, the hub was restarted: new versions belong to that lineage, and continue
    the previous versions.
    """

    lineage: str = ""


class Revoked(msgspec.Struct, frozen=True, array_like=True, tag="revoked", gc=False):
    """A key is no longer valid; its devices must be expelled."""

    key: Key


class HubStopRequested(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """A user requested that the hub ends.

    If `finished` is set, training is complete, and the devices end, too.
    """

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
