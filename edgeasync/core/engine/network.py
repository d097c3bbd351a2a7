"""What a hub needs of a network: `edgeasync.net` has it over ZeroMQ. It runs on one loop, and never waits."""

from collections import Counter
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


class HubNetwork(Protocol):
    """A hub's end of a network: it says whose each message is, and keeps off what exceeds its bounds."""

    @property
    def address(self) -> str:
        """Where it listens; with the port that was found, once it does."""

    def listen(self, receiver: HubReceiver) -> None:
        """Listen on the running loop; raises `AddressError`."""

    def admit(self) -> None:
        """Admit keys from now on; those that the hub knew were held against the list before."""

    def gives(self, key: Key, device_id: str) -> bool:
        """Return whether the list of keys gives this device to this key; without a list, always."""

    def send(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message without waiting, or drop it if it cannot be sent now. A long payload must not change."""

    @property
    def kept_off(self) -> Counter[str]:
        """How often something was kept off by a bound, by the reason."""

    @property
    def not_let_in(self) -> Counter[str]:
        """How often somebody was not let in, by the reason."""

    def close(self) -> None:
        """Let nobody in any more, and close; goodbyes that were sent have a moment to leave."""
