"""What the hub's engine needs done in the world; the ZeroMQ daemon and the simulator do it."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.effects import Report
from edgeasync.core.hub.events import Evaluated, Peer
from edgeasync.core.recovery.state import HubState
from edgeasync.protocol import wire

Result = TypeVar("Result")


class HubShell(Protocol):
    """What the engine needs done in the world."""

    def send(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message, or drop it if the peer is gone or takes nothing in: its lease will tell."""

    def run_in_background(self, work: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Do `work` in the background, one after the other, then call `then` with its result."""

    def save(self, state: HubState) -> None:
        """Write a checkpoint to disk in the background, then call `saved`; once the core has stopped, the last."""

    def save_best(self, snapshot: Snapshot, loss: float, accuracy: float | None) -> None:
        """Write the best model so far to disk in the background."""

    def evaluate(self, snapshot: Snapshot, then: Callable[[Evaluated], None]) -> None:
        """Evaluate a version on held-out data in the background, then call `then`; skip it if one is under way."""

    def report(self, report: Report) -> None:
        """Tell people."""

    def describe(self) -> dict[str, Any]:
        """Return what only the shell knows, to be added to the status."""

    def stop(self, reason: str) -> None:
        """End: everything before has been done."""
