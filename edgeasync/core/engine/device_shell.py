"""What the device's engine needs done in the world; the ZeroMQ agent and the simulator do it."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.arrays.spool import Spool
from edgeasync.core.device.effects import Report, Stop
from edgeasync.core.device.events import Trained
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Welcome

Result = TypeVar("Result")


class DeviceShell(Protocol):
    """What the engine needs done in the world."""

    def connect(self) -> None:
        """Open a fresh connection to the hub."""

    def disconnect(self) -> None:
        """Close the connection."""

    def send(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message, or drop it if there is no connection."""

    def has_graph(self, fingerprint: str) -> bool:
        """Return whether the device holds this graph, whole; called in the background."""

    def keep_graph(self, fingerprint: str, graph: bytes) -> None:
        """Hold a graph that has its fingerprint; called in the background."""

    def prepare(self, welcome: Welcome) -> None:
        """Prepare to train what the hub describes; may raise what waiting does not fix.

        If the welcome speaks of a graph, `has_graph` or `keep_graph` has seen that, but nobody has screened it.
        A trainer's state that was kept with an update is restored, unless that was put aside.
        """

    def keep(self, spool: Spool) -> None:
        """Write an update and the trainer's state where they outlive a power cut; called in the background.

        A disk that fails is the shell's to tell of: the update leaves all the same.
        """

    def put_aside(self, reason: str) -> None:
        """Put aside what `keep` wrote before this start, and tell."""

    def train(
        self, model: DeviceModel, local_steps: int, then: Callable[[Trained], None], *, overlap: bool
    ) -> None:
        """Train `model.parameters` in the background, then call `then`; not if training was stopped.

        With `overlap`, training continues from the current parameters until `pause`, and `then` is called only if
        it took a step.
        """

    def pause(self) -> None:
        """End overlapped training after the current step; that includes training that is about to begin."""

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` in the background, one after the other with training, then call `then`."""

    def report(self, report: Report) -> None:
        """Tell the person at the device."""

    def stop(self, stop: Stop) -> None:
        """End the agent."""
