"""Interfaces of the device's engine for I/O, training and disk.

The ZeroMQ agent and the simulator implement them.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.core.device.effects import DeviceReport, EndAgent
from edgeasync.core.device.events import Trained
from edgeasync.core.device.throttle import Pace
from edgeasync.protocol import wire
from edgeasync.protocol.graph import Base
from edgeasync.protocol.messages import Welcome

Result = TypeVar("Result")


class DeviceTraining(Protocol):
    """A device's background thread, which trains, and runs other jobs one at a time.

    Implementations call each `then` on the engine's thread, and never inside a call of the engine.
    """

    def train(
        self, model: DeviceModel, local_steps: int, then: Callable[[Trained], None], *, overlap: bool, first: bool
    ) -> None:
        """Train `model.parameters`, then call `then` unless the agent is ending.

        With `overlap`, continue from the current parameters until `pause` is called. If this is the
        `first` assignment, training may start from the device's own parameters. If the trainer has
        no remaining steps, it reports 0 steps.
        """

    def pause(self) -> None:
        """End overlapped training after the current step, or before the first one."""

    def set_pace(self, pace: Pace) -> None:
        """Take local steps at this pace from now on.

        A step that is already running is completed first.
        """

    def reset(self) -> None:
        """Reset the trainer's state, such as momentum; runs in the background."""

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the trainer's learning rate by a factor; runs in the background."""

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` after all earlier jobs."""

    def run(self, work: Callable[[], Result], then: Callable[[Result], None], *, brief: bool = False) -> None:
        """Run `work` after all earlier jobs, then call `then` with its result.

        `brief` work may also run inside this call.
        """


class DeviceSpool(Protocol):
    """Stores the state that a power cut would destroy. All methods run in the background.

    If the disk fails, they report the failure and return, and the device continues.
    """

    def keep(self, spool: Spool) -> None:
        """Write an update and the trainer's state."""

    def keep_model(self, held: HeldModel) -> None:
        """Write the model, so that the device can resume from it.

        The values of `held` change after the call.
        """

    def put_aside(self, reason: str) -> None:
        """Rename the file of an update from before a restart, and report this."""


class DeviceBases(Protocol):
    """Stores bases on disk, and parts of a base that were downloaded. All methods run in the background."""

    def find(self, base: Base) -> int | None:
        """Return how many bytes of a base are stored, counted from its start.

        If all are stored, the base is verified, and the shell uses it in `prepare`. Return `None`
        if another process downloads the base.
        """

    def append(self, base: Base, offset: int, part: wire.Buffer) -> None:
        """Store the next part of a base that `find` has not found complete.

        Raises `StorageError` if it cannot be stored, for example on a full disk.
        """

    def finish(self, base: Base, checksum: int) -> bool:
        """Verify a base of which all bytes are stored; return whether it is the announced one.

        `checksum` is the hub's checksum of the content. Raises `StorageError` if the content does
        not match it, and deletes what is stored.
        """


class DeviceShell(Protocol):
    """The I/O of the device's engine.

    Call the engine from one thread: first `begin`, then

    - `on_message` for every message from the hub,
    - `handle` with `Connected`, `Disconnected` and users' requests (`PersonsEvent`),
    - `tick` at the time that `next_deadline_s` returns, which may change with every call.
    """

    @property
    def bases(self) -> DeviceBases:
        """The device's cache of bases."""

    def connect(self) -> None:
        """Open a new connection to the hub with the position `core.hub` in the device's list."""

    def disconnect(self, *, goodbye: bool = False) -> None:
        """Close the connection; if `goodbye` is set, send queued messages first."""

    def has_connected(self) -> bool:
        """Return whether the connection has been established, so that sent messages have left."""

    def send(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message, or drop it if the device is not connected."""

    def has_graph(self, fingerprint: str) -> bool:
        """Return whether the device has stored this graph; runs in the background."""

    def keep_graph(self, fingerprint: str, graph: bytes) -> None:
        """Store a graph with a verified fingerprint; runs in the background."""

    def prepare(self, welcome: Welcome) -> None:
        """Prepare to train the model that the hub's `Welcome` describes.

        Raises `EdgeAsyncError` for a failure that waiting would not fix. If the welcome names a
        graph, `has_graph` or `keep_graph` was called with its fingerprint, and its base is in
        `bases`; check the graph before using it. Restore the trainer's state that was saved with an
        update, unless the update was put aside.
        """

    def keep_quota(self, record: QuotaRecord) -> None:
        """Write the count of the daily quota to disk soon.

        If the disk fails, report the failure.
        """

    def wall_s(self) -> float:
        """Return the seconds since 1970 by the device's clock, which may be wrong."""

    def report(self, report: DeviceReport) -> None:
        """Report an event to the user of the device."""

    def stop(self, stop: EndAgent) -> None:
        """End the agent."""
