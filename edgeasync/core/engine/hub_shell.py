"""The interface of the hub's engine for I/O and threads.

The ZeroMQ daemon and the simulator implement it.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.events import Evaluated, Peer
from edgeasync.core.recovery.state import HubState
from edgeasync.protocol import wire

Result = TypeVar("Result")


class HubShell(Protocol):
    """The I/O and threads of the hub's engine.

    Call the engine from one thread, and pass the core's time, which never decreases, with each
    call:

    - `on_message` for every message, `request_stop` to end,
    - `tick` at the time that `next_deadline_s` returns, which may change with every call,
    - with a log, `on_durable` when more of the log is durable, and `on_failing` when a write
      fails.

    Call each `then` on the engine's thread, and never inside a call of the engine.
    """

    def send(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message without blocking.

        Drop it if the peer is disconnected or does not read its messages.
        """

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run `work` in the background after earlier work, then call `then` with its result."""

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after a delay.

        If the delay is 0, call it after everything that is already due.
        """

    def save(self, state: HubState) -> None:
        """Write a checkpoint in the background, then call `saved`, even if the write failed.

        If the core has stopped, this is the last checkpoint.
        """

    def save_best(self, snapshot: Snapshot, loss: float, accuracy: float | None) -> None:
        """Write the best model so far to disk in the background."""

    def evaluate(self, snapshot: Snapshot, then: Callable[[Evaluated], None]) -> None:
        """Evaluate a version on held-out data in the background, then call `then`.

        Skip the evaluation if another one is running.
        """

    def address_of(self, peer: Peer) -> str:
        """Return the IP address of a connection, or "" if it is unknown."""

    def wall_s(self) -> float:
        """Return the seconds since 1970."""

    def report(self, report: HubReport) -> None:
        """Report an event to users."""

    def describe(self) -> dict[str, Any]:
        """Return those fields of the status that only the shell knows."""

    def stop(self, reason: str) -> None:
        """End the hub. All earlier effects have been executed."""
