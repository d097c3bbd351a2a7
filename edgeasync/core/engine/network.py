"""The callbacks of a hub's network, which are called by `net/hub_listener.py`."""

from typing import Protocol

from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import Peer
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Key


class HubReceiver(Protocol):
    """The callbacks that a hub's network calls."""

    def allows(self, who: Key | Peer, header_bytes: int) -> bool:
        """Return whether a key or, without keys, a connection may send one more message now."""

    def receive(self, peer: Peer, header: bytes, payload: wire.Buffer | None, sender: Sender) -> None:
        """Process a message."""

    def on_idle(self) -> None:
        """Handle the end of a batch: all messages that have arrived were delivered."""

    def on_sweep(self) -> None:
        """Handle the sweep of connections, once a second, after it has updated `kept_off`."""

    def on_revoked(self, keys: set[Key]) -> None:
        """Expel the devices of revoked keys. Their connections are closed afterwards."""

    def warn(self, detail: str) -> None:
        """Report a problem, but continue to run the hub."""

    def fail(self, error: BaseException) -> None:
        """End the hub because of this error."""
