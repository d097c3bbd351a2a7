"""Effects of the hub's core. The engine and a shell (ZeroMQ, simulator) carry them out in order."""

import math
from typing import Literal

import msgspec

from edgeasync.core.hub.events import Peer
from edgeasync.policies.transforms import Scalars
from edgeasync.protocol.messages import Ack, Message, ModelVersion, Push


class SendToDevice(msgspec.Struct, frozen=True, gc=False):
    """Send a message without payload."""

    peer: Peer
    message: Message


class Broadcast(msgspec.Struct, frozen=True, gc=False):
    """Send a message without payload to many connections, after the assignments and folds decided before."""

    peers: tuple[Peer, ...]
    message: Message


class SendStatus(msgspec.Struct, frozen=True, gc=False):
    """Send the hub's status to the connection that asked; one that `confirms` says that an order is durable."""

    peer: Peer
    confirms: bool = False


class Assign(msgspec.Struct, frozen=True, gc=False):
    """Send an assignment of the published model, at `version`, as soon as that version is published.

    `base` is the version that the device holds, if the hub may send deltas from it, and `held` the checksum of
    what it holds, if it says that. With `coarse` the device may be sent a coarse whole model.
    """

    peer: Peer
    version: ModelVersion
    local_steps: int
    codec: str
    ack: Ack | None
    base: int | None = None
    push_codec: str | None = None
    held: int | None = None
    coarse: bool = False
    learning_rate_factor: float = 1.0


class Publish(msgspec.Struct, frozen=True, gc=False):
    """Move the published model to the current version; `whole` after a rollback, when no delta leads there."""

    number: int
    whole: bool = False


class SendGraph(msgspec.Struct, frozen=True, gc=False):
    """Send the training graph."""

    peer: Peer


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Open a buffer for the announced push and grant its first credit."""

    peer: Peer
    push: Push


class Fold(msgspec.Struct, frozen=True, gc=False):
    """Make the next version: current - scale transforms(-sum of weight times delta); then drop the updates.

    With `measure`, report the sum's norm by `Folded`. A robust combiner adds updates of the same row up first;
    without `rows`, each is a row. `norm_usual` is the devices' median norm, for a combiner with a centre; infinity
    while that is unknown, and for the others.
    """

    number: int
    handles: tuple[int, ...]
    weights: tuple[float, ...]
    plan: tuple[Scalars, ...]
    scale: float = 1.0
    measure: bool = False
    rows: tuple[int, ...] = ()
    norm_usual: float = math.inf


class Keep(msgspec.Struct, frozen=True, gc=False):
    """Keep the current version for a rollback, with the one that was kept last; drop the one before that."""


class Restore(msgspec.Struct, frozen=True, gc=False):
    """Make the older of the two versions kept the next one, under this number, and clear the optimizer's state."""

    number: int


class Evaluate(msgspec.Struct, frozen=True, gc=False):
    """Evaluate the current version on held-out data and report `Evaluated`."""


class WriteBest(msgspec.Struct, frozen=True, gc=False):
    """Write the version that was evaluated last to disk as the best; without held-out data, the current one."""

    loss: float
    accuracy: float | None


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Drop a payload that will not be folded."""

    handle: int


class SuspendTransfers(msgspec.Struct, frozen=True, gc=False):
    """Suspend the transfers of a connection that no longer belongs to a member."""

    peer: Peer


class Expel(msgspec.Struct, frozen=True, gc=False):
    """End the transfers of a device that is shut out, and keep nothing of them."""

    peer: Peer
    owner: tuple[str, bytes]


ReportName = Literal[
    "alarm", "awake", "calm", "evaluated", "excluded", "finished", "joined", "left", "listening", "lost",
    "not_writing", "paused", "plateau", "quarantined", "reconnected", "rejoined", "released", "replaying",
    "resting", "resumed", "revoked", "stopping", "training", "warm", "warning", "writing",
]  # fmt: skip


class HubReport(msgspec.Struct, frozen=True):
    """Tell people what happened; `device_id` is empty if it concerns the whole hub. An alarm has `figures`.

    The engine adds `decided_s`, the core's time of the decision, when it passes the report on. What the shell
    reports of itself has none.
    """

    event: ReportName
    device_id: str = ""
    detail: str = ""
    figures: dict[str, float] = {}
    decided_s: float | None = None


class Save(msgspec.Struct, frozen=True, gc=False):
    """Write a checkpoint."""


class EndHub(msgspec.Struct, frozen=True, gc=False):
    """End the hub once everything before this effect is done."""

    reason: str


HubEffect = (
    SendToDevice | Broadcast | SendStatus | SendGraph | Assign | Receive | Fold | Publish | Keep | Restore
    | Evaluate | WriteBest | Discard | SuspendTransfers | Expel | HubReport | Save | EndHub
)  # fmt: skip
