"""Callbacks of a hub's network, which `net/hub_listener.py` calls."""

from typing import Protocol

from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import Peer
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Key


class HubReceiver(Protocol):
    """Callbacks of a hub's network."""

    def allows(self, who: Key | Peer, header_bytes: int) -> bool:
        """Return whether a key, or a peer without one, may send one more message now."""

    def receive(self, peer: Peer, header: bytes, payload: wire.Buffer | None, sender: Sender) -> None:
        """Process a message."""

    def on_idle(self) -> None:
        """React to the delivery of all messages that have arrived."""

    def on_sweep(self) -> None:
        """React to the sweep of connections, once a second, after `kept_off` was updated."""

    def on_revoked(self, keys: set[Key]) -> None:
        """Expel the devices of revoked keys, whose connections are closed afterwards."""

    def warn(self, detail: str) -> None:
        """Report a problem that does not end the hub."""

    def fail(self, error: BaseException) -> None:
        """End the hub with this error."""
