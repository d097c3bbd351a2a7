"""The I/O and threads that the hub's engine asks for: the ZeroMQ daemon and the simulator do it."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.events import Evaluated, Peer
from edgeasync.core.recovery.state import HubState
from edgeasync.protocol import wire

Result = TypeVar("Result")


class HubShell(Protocol):
    """The I/O and threads that the hub's engine asks for.

    Use the engine from one thread. Call `on_message` for every message, `request_stop` to end, and `tick` when
    `next_deadline_s` is due, which every call may change; give each the core's time, which never goes back. With
    a log call `on_durable` whenever more of it is durable, and `on_failing` when it cannot be written. Call each
    `then` on the engine's thread, never from inside a call of the engine.
    """

    def send(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message without waiting; drop it if the peer is gone or does not read: its lease will end."""

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` in the background, after earlier work; then call `then` with its result."""

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` in a while; with 0 once what waits to be done by now is done."""

    def save(self, state: HubState) -> None:
        """Write a checkpoint to disk in the background, then call `saved`, even if it could not be written.

        If the core has stopped, this is the last checkpoint.
        """

    def save_best(self, snapshot: Snapshot, loss: float, accuracy: float | None) -> None:
        """Write the best model so far to disk in the background."""

    def evaluate(self, snapshot: Snapshot, then: Callable[[Evaluated], None]) -> None:
        """Evaluate a version on held-out data in the background, then call `then`; skip it if another one runs."""

    def report(self, report: HubReport) -> None:
        """Tell people what happened."""

    def describe(self) -> dict[str, Any]:
        """Return the part of the status that only the shell knows."""

    def stop(self, reason: str) -> None:
        """End the hub: all earlier effects have been carried out."""
