"""What a hub's network tells: `net/hub_listener.py` calls it, on the hub's loop."""

from typing import Protocol

from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import Peer
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Key


class HubReceiver(Protocol):
    """What a hub's network calls."""

    def allows(self, who: Key | Peer, header_bytes: int) -> bool:
        """Return whether a key, or a peer without one, may send one more message now."""

    def receive(self, peer: Peer, header: bytes, payload: wire.Buffer | None, sender: Sender) -> None:
        """Handle a message."""

    def on_idle(self) -> None:
        """Note that all messages that had arrived were delivered."""

    def on_sweep(self) -> None:
        """Note, once a second, that connections were checked and `kept_off` is current."""

    def on_revoked(self, keys: set[Key]) -> None:
        """End what keys have here that count no more; then the network shuts their connections."""

    def warn(self, detail: str) -> None:
        """Report a problem that does not end the hub."""

    def fail(self, error: BaseException) -> None:
        """End the hub with this error."""
