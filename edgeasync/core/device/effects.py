"""Effects of the device's core. The engine and a shell (ZeroMQ, simulator) carry them out in order."""

from typing import Literal

import msgspec

from edgeasync.core.device.throttle import Pace
from edgeasync.errors import EdgeAsyncError
from edgeasync.protocol.messages import Assignment, GraphHeader, Message, Outcome, Push, Welcome


class Connect(msgspec.Struct, frozen=True, gc=False):
    """Open a fresh connection to the hub; transfers on an older one end."""


class CloseConnection(msgspec.Struct, frozen=True, gc=False):
    """Close the connection; with `goodbye` after what was sent last has left."""

    goodbye: bool = False


class SendToHub(msgspec.Struct, frozen=True, gc=False):
    """Send a message without payload."""

    message: Message


class SendPush(msgspec.Struct, frozen=True, gc=False):
    """Send the update under this header, whole or in pieces."""

    push: Push


class PrepareTraining(msgspec.Struct, frozen=True, gc=False):
    """Prepare to train what the hub describes."""

    welcome: Welcome


class FindGraph(msgspec.Struct, frozen=True, gc=False):
    """Look for a graph with this fingerprint on the device, then report `GraphHeld` or `GraphMissing`."""

    fingerprint: str


class TakeGraph(msgspec.Struct, frozen=True, gc=False):
    """Receive the payload of this graph, then report `GraphHeld`, `GraphBroken` or `GraphForged`."""

    graph: GraphHeader


class InstallModel(msgspec.Struct, frozen=True, gc=False):
    """Receive and decode the payload of this assignment, then report `ModelInstalled`.

    Under a hub that delays models, report `ModelArrived` before it is decoded, and wait for `UseModel`.
    """

    assignment: Assignment


class UseModel(msgspec.Struct, frozen=True, gc=False):
    """Decode the payload that has arrived, then report `ModelInstalled`."""

    assignment: Assignment


class ResolvePush(msgspec.Struct, frozen=True, gc=False):
    """Drop the payload of the push that has this outcome; if rejected, undo its effect on the residual."""

    outcome: Outcome


class Train(msgspec.Struct, frozen=True, gc=False):
    """Take local steps from the installed model, then report `Trained`.

    With `overlap` training continues from the current parameters until the next model arrives; then report
    `OverlapTrained`. No steps are left to take if the device has taken them all during a delay.
    """

    local_steps: int
    overlap: bool = False


class SetPace(msgspec.Struct, frozen=True, gc=False):
    """Take local steps at this pace from now on; a running step ends first."""

    pace: Pace


class ScaleLearningRate(msgspec.Struct, frozen=True, gc=False):
    """Multiply the trainer's own learning rate by this factor from the next local step on."""

    factor: float


class PutAside(msgspec.Struct, frozen=True):
    """Put aside the update that an earlier start kept: it was trained from another model than the hub's."""

    reason: str


FINISHED = "the hub has finished training"
"""The reason of an agent that ends because its hub has."""

ReportName = Literal[
    "alone", "answered", "disconnected", "enrolled", "full_pace", "graph", "joined", "paused", "quarantined",
    "released", "resting", "slowed", "unexpected", "unreachable", "waiting", "warning",
]  # fmt: skip


class DeviceReport(msgspec.Struct, frozen=True):
    """Tell the person at the device what happened; `since_s` is when it began by the core's clock, if needed."""

    event: ReportName
    detail: str = ""
    since_s: float | None = None


class EndAgent(msgspec.Struct, frozen=True):
    """End the agent, with an error if something is wrong that waiting does not fix."""

    reason: str
    error: EdgeAsyncError | None = None


WorkEffect = (
    FindGraph | TakeGraph | PrepareTraining | InstallModel | UseModel | ScaleLearningRate | Train | ResolvePush
)
DeviceEffect = (
    Connect | CloseConnection | SendToHub | SendPush | SetPace | PutAside | DeviceReport | EndAgent | WorkEffect
)
