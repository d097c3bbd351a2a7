"""`PeerCore`: a peer as a deterministic state machine. Events and time in, effects out; no I/O, no clock."""

import math

from edgeasync.core.peer.effects import PeerEffect
from edgeasync.core.peer.events import PeerEvent
from edgeasync.core.peer.settings import PeerSettings


class PeerCore:
    """A peer's decisions. `begin`, `handle` and `tick` return effects to carry out in order.

    `incarnation` must grow with every start under the same key. Call `tick` at `next_deadline_s`.
    """

    def __init__(self, name: str, incarnation: int, peers: tuple[str, ...], settings: PeerSettings) -> None:
        self.name = name
        self.incarnation = incarnation
        self.peers = peers
        self.settings = settings

    def begin(self, now_s: float) -> list[PeerEffect]:
        """Say hello to all peers."""
        raise NotImplementedError

    def handle(self, event: PeerEvent, now_s: float) -> list[PeerEffect]:
        """Return the effects of an event."""
        raise NotImplementedError

    def tick(self, now_s: float) -> list[PeerEffect]:
        """Do what is due."""
        raise NotImplementedError

    @property
    def next_deadline_s(self) -> float:
        """When `tick` is next due."""
        return math.inf
