"""Effects of the device's core, which the engine and a shell execute in order."""

from typing import Literal

import msgspec

from edgeasync.core.device.throttle import Pace
from edgeasync.errors import EdgeAsyncError
from edgeasync.protocol.graph import Base
from edgeasync.protocol.messages import Assignment, GraphHeader, Message, Outcome, Push, Welcome


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Open a new connection to the hub. Transfers on an older connection end."""


class CloseConnection(msgspec.Struct, frozen=True, gc=False):
    """Close the connection; if `goodbye` is set, send all queued messages first."""

    goodbye: bool = False


class SendToHub(msgspec.Struct, frozen=True, gc=False):
    """Send a message without payload."""

    message: Message


class SendPush(msgspec.Struct, frozen=True, gc=False):
    """Send the update that this header describes, whole or in pieces."""

    push: Push


class PrepareTraining(msgspec.Struct, frozen=True, gc=False):
    """Prepare to train the model that the hub's `Welcome` describes."""

    welcome: Welcome


class FindGraph(msgspec.Struct, frozen=True, gc=False):
    """Look up a stored graph, then report `GraphHeld` or `GraphMissing`."""

    fingerprint: str


class FindBase(msgspec.Struct, frozen=True, gc=False):
    """Look up a stored base, then report `GraphHeld`, `GraphMissing` or `GraphLocked`."""

    base: Base


class TakeGraph(msgspec.Struct, frozen=True, gc=False):
    """Receive the payload of this graph or, if `base` is set, of this base.

    Report `GraphArrived` when it is complete. Then report `GraphHeld`, `GraphBroken` or
    `GraphForged`.
    """

    graph: GraphHeader
    base: bool = False


class InstallModel(msgspec.Struct, frozen=True, gc=False):
    """Receive and decode the payload of this assignment, then report `ModelInstalled`.

    If the hub has set a delay, report `ModelArrived` before decoding, and wait for `UseModel`.
    """

    assignment: Assignment


class UseModel(msgspec.Struct, frozen=True, gc=False):
    """Decode the payload that has arrived, then report `ModelInstalled`."""

    assignment: Assignment


class ResolvePush(msgspec.Struct, frozen=True, gc=False):
    """Drop the payload of the push that was answered with this outcome.

    If the push was rejected, undo its effect on the residual.
    """

    outcome: Outcome


class Train(msgspec.Struct, frozen=True, gc=False):
    """Take local steps from the installed model, then report `Trained`.

    If `overlap` is set, training continues from the current parameters until the next model
    arrives. Then report `OverlapTrained`. `local_steps` may be 0 if the device took all steps
    during a delay.
    """

    local_steps: int
    overlap: bool = False


class SetPace(msgspec.Struct, frozen=True, gc=False):
    """Take local steps at this pace from now on.

    A step that is already running is completed first.
    """

    pace: Pace


class ScaleLearningRate(msgspec.Struct, frozen=True, gc=False):
    """Multiply the trainer's learning rate by this factor, from the next local step on."""

    factor: float


class PutAside(msgspec.Struct, frozen=True):
    """Put aside the update saved before a restart, because it belongs to another model."""

    reason: str


FINISHED = "the hub has finished training"
"""The reason why an agent ends when its hub has finished training."""

ReportName = Literal[
    "alone", "answered", "base", "disconnected", "enrolled", "full_pace", "graph", "joined", "paused",
    "quarantined", "released", "resting", "slowed", "unexpected", "unreachable", "waiting", "warning",
]  # fmt: skip


class DeviceReport(msgspec.Struct, frozen=True):
    """Report an event to the user of the device.

    If relevant, `since_s` is the time at which it began, by the core's clock.
    """

    event: ReportName
    detail: str = ""
    since_s: float | None = None


class EndAgent(msgspec.Struct, frozen=True):
    """End the agent; if waiting would not remove the cause, end with an error."""

    reason: str
    error: EdgeAsyncError | None = None


GraphEffect = FindGraph | FindBase | TakeGraph
WorkEffect = GraphEffect | PrepareTraining | InstallModel | UseModel | ScaleLearningRate | Train | ResolvePush
DeviceEffect = (
    Connect | CloseConnection | SendToHub | SendPush | SetPace | PutAside | DeviceReport | EndAgent | WorkEffect
)
