"""What a hub and a device need of a network. `edgeasync.net` has both, over ZeroMQ; a simulated fleet has neither.

Both run on one event loop, and never wait. A hub's network calls a `HubReceiver`; a device's calls what its
constructor was given: for a message, for a connection, and for the end of one.
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from edgeasync.core.device.effects import DeviceReport
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


class DeviceNetwork(Protocol):
    """A device's end of a network: one connection at a time, to one of its hub's addresses."""

    @property
    def address(self) -> str:
        """The address that is spoken to."""

    @property
    def bytes_up(self) -> int:
        """Bytes of all messages to the hub."""

    @property
    def bytes_down(self) -> int:
        """Bytes of all messages from the hub."""

    def begin(self) -> None:
        """Begin on the running loop."""

    def connect(self, number: int) -> None:
        """Open a fresh connection to the address of this number; raises `AddressError`."""

    def has_connected(self) -> bool:
        """Return whether the hub has answered on this connection, so that what was sent has left."""

    def send(self, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message without waiting; without a connection it is dropped."""

    def explain(self, waiting: DeviceReport, then: Callable[[DeviceReport], None]) -> None:
        """Call `then` with the report, once it is known since when no hub is reached, and why not."""

    def close(self, *, goodbye: bool, answered: bool) -> None:
        """Close the connection, over which the hub may have `answered`; with `goodbye` let what was sent leave."""

    def cancel(self) -> None:
        """Explain no more."""

    def end(self) -> None:
        """End, after `close`."""
