"""Effects of the hub's core, which the engine and a shell execute in order."""

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
    """Send a message without payload to many connections.

    The message is sent after all assignments and folds decided before it.
    """

    peers: tuple[Peer, ...]
    message: Message


class SendStatus(msgspec.Struct, frozen=True, gc=False):
    """Send the hub's status to the requester.

    If `confirms` is set, the answer confirms that an order is durable. `watches` and `events_after`
    are the fields of the `StatusRequest`.
    """

    peer: Peer
    confirms: bool = False
    watches: bool = False
    events_after: int | None = None


class Assign(msgspec.Struct, frozen=True, gc=False):
    """Send an assignment of the published model once `version` is published.

    `base` is the number of the version that the device has, if the hub may send deltas from it.
    `held` is the checksum that the device reported for that version. If `coarse` is set, the hub
    may send a coarse whole model. If `plain` is set, `version` is the newest version instead of the
    published one, and the hub sends it whole.
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
    plain: bool = False
    learning_rate_factor: float = 1.0


class Publish(msgspec.Struct, frozen=True, gc=False):
    """Make the current version the published version.

    `whole` is set after a rollback, because there is no delta to the restored version.
    """

    number: int
    whole: bool = False


class SendGraph(msgspec.Struct, frozen=True, gc=False):
    """Send the training graph or, if `base` is set, its base."""

    peer: Peer
    base: bool = False


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Open a buffer for the announced push, and grant its first credit."""

    peer: Peer
    push: Push


class Fold(msgspec.Struct, frozen=True, gc=False):
    """Compute the next version: current - scale * transforms(-sum(weight * delta)).

    Then drop the updates.

    - `measure`: whether the engine reports the norm of the weighted sum in a `Folded` event.
    - `rows`: the row of each update. A robust combiner first sums the updates that have the same
      row. If `rows` is empty, each update has its own row.
    - `norm_usual`: the median norm of the devices' updates, for a `centred` combiner. It is
      infinite while the median is unknown, and for other combiners.
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
    """Keep the current version and the last kept version for a rollback; drop older ones."""


class Restore(msgspec.Struct, frozen=True, gc=False):
    """Make the older of the kept versions the next version, and reset the optimizer."""

    number: int


class Evaluate(msgspec.Struct, frozen=True, gc=False):
    """Evaluate the current version on held-out data, then report `Evaluated`."""


class WriteBest(msgspec.Struct, frozen=True, gc=False):
    """Write the last evaluated version to disk as the best version.

    Without held-out data, write the current version.
    """

    loss: float
    accuracy: float | None


class Discard(msgspec.Struct, frozen=True, gc=False):
    """Drop a payload that will not be folded."""

    handle: int


class SuspendTransfers(msgspec.Struct, frozen=True, gc=False):
    """Suspend the transfers of a connection that no longer belongs to a member."""

    peer: Peer


class Expel(msgspec.Struct, frozen=True, gc=False):
    """Cancel the transfers of a revoked device, and drop partial uploads."""

    peer: Peer
    owner: tuple[str, bytes]


ReportName = Literal[
    "admitted", "alarm", "awake", "calm", "evaluated", "excluded", "finished", "joined", "left", "listening",
    "lost", "not_writing", "paused", "plateau", "quarantined", "reconnected", "refused", "rejoined", "released",
    "replaying", "resting", "resumed", "revoked", "stopping", "training", "warm", "warning", "writing",
]  # fmt: skip


class HubReport(msgspec.Struct, frozen=True):
    """Report an event to users; `device_id` is empty if the event concerns the whole hub.

    An alarm has `figures`. When the engine forwards the report, it sets `decided_s` to the time of
    the decision by the core's clock. In reports of the shell, `decided_s` is `None`.
    """

    event: ReportName
    device_id: str = ""
    detail: str = ""
    figures: dict[str, float] = {}
    decided_s: float | None = None


class Save(msgspec.Struct, frozen=True, gc=False):
    """Write a checkpoint."""


class EndHub(msgspec.Struct, frozen=True, gc=False):
    """End the hub once all earlier effects are executed."""

    reason: str


HubEffect = (
    SendToDevice | Broadcast | SendStatus | SendGraph | Assign | Receive | Fold | Publish | Keep | Restore
    | Evaluate | WriteBest | Discard | SuspendTransfers | Expel | HubReport | Save | EndHub
)  # fmt: skip
