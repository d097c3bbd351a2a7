"""What the device's engine asks for: I/O, training and a disk. The ZeroMQ agent and the simulator have them."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.core.device.effects import DeviceReport, EndAgent
from edgeasync.core.device.events import Trained
from edgeasync.core.device.throttle import Pace
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Welcome

Result = TypeVar("Result")


class DeviceTraining(Protocol):
    """A device's background: it trains, and does other work, in the order of the calls and one at a time.

    Each `then` is called on the engine's thread, never from inside a call of the engine.
    """

    def train(
        self, model: DeviceModel, local_steps: int, then: Callable[[Trained], None], *, overlap: bool, first: bool
    ) -> None:
        """Train `model.parameters`, then call `then` unless the agent is ending.

        With `overlap`, continue from the current parameters until `pause`. The `first` assignment may begin with
        parameters of the device's own. A trainer that has no more steps has taken 0.
        """

    def pause(self) -> None:
        """End overlapped training after the current step; without a step if it is still waiting to begin."""

    def set_pace(self, pace: Pace) -> None:
        """Take local steps at this pace from now on; a running step ends first."""

    def reset(self) -> None:
        """Let the trainer forget what its earlier steps left, such as momentum; runs in the background."""

    def scale_learning_rate(self, factor: float) -> None:
        """Let the trainer multiply its own learning rate by a factor; runs in the background."""

    def submit(self, work: Callable[[], object]) -> None:
        """Do `work` after all that was asked for before."""

    def run(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` after all that was asked for before, then call `then` with its result."""


class DeviceSpool(Protocol):
    """Where a device keeps what would be lost with the power. All methods run in the background.

    If the disk fails, they report that and return: the device works on all the same.
    """

    def keep(self, spool: Spool) -> None:
        """Write an update and the trainer's state."""

    def keep_model(self, held: HeldModel) -> None:
        """Write the model, to be led on from after a restart. The values change after the call."""

    def put_aside(self, reason: str) -> None:
        """Put aside the update that `keep` wrote in an earlier start, and report it."""


class DeviceShell(Protocol):
    """The I/O that the device's engine asks for.

    Use the engine from one thread. Call `begin`, then `on_message` for every message from the hub, `handle` with
    `Connected` and `Disconnected` when the connection is made and when it breaks, and with what a person asks for
    (`PersonsEvent`), and `tick` when `next_deadline_s` is due, which every call may change.
    """

    def connect(self) -> None:
        """Open a fresh connection to hub number `core.hub` of the device's list."""

    def disconnect(self, *, goodbye: bool = False) -> None:
        """Close the connection; with `goodbye` let what was sent last leave."""

    def has_connected(self) -> bool:
        """Return whether the connection has met a peer, so that what was sent has left."""

    def send(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message, or drop it if there is no connection."""

    def has_graph(self, fingerprint: str) -> bool:
        """Return whether the device holds this graph, whole; runs in the background."""

    def keep_graph(self, fingerprint: str, graph: bytes) -> None:
        """Keep a graph, whose fingerprint was checked; runs in the background."""

    def prepare(self, welcome: Welcome) -> None:
        """Prepare to train what the hub describes; raise an `EdgeAsyncError` if waiting would not fix what fails.

        If the welcome names a graph, `has_graph` or `keep_graph` has been called with it: screen it before use.
        Restore the trainer's state that was kept with an update, unless the update was put aside.
        """

    def keep_quota(self, record: QuotaRecord) -> None:
        """Write the count of the day's bytes to disk, to outlive a crash, soon; if the disk fails, report that."""

    def report(self, report: DeviceReport) -> None:
        """Tell the person at the device."""

    def stop(self, stop: EndAgent) -> None:
        """End the agent."""
