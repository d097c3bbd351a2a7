"""Strikes of connections that are no member's."""

from edgeasync.core.hub.events import Peer

STRANGERS_MAX = 4096
"""How many connections without a member have their strikes remembered."""


class Strangers:
    """Strikes of connections without a member, or of their keys: of the `STRANGERS_MAX` that were struck last.

    They end `quarantine_s` after the last one. An end that hangs on the last strike alone lets a replay, which
    knows fewer strikes than the hub knew, refuse nobody whom the hub admitted.
    """

    def __init__(self, strikes_max: int, quarantine_s: float) -> None:
        self._strikes_max = strikes_max
        self._quarantine_s = quarantine_s
        self._strikes: dict[Peer, tuple[int, float]] = {}

    def remaining_s(self, peer: Peer, now_s: float) -> float:
        """Return for how long a connection stays shut out; 0 if it is not."""
        strikes, ends_s = self._strikes.get(peer, (0, 0.0))
        return max(0.0, ends_s - now_s) if strikes >= self._strikes_max else 0.0

    def strike(self, peer: Peer, now_s: float) -> None:
        """Count a strike."""
        strikes, ends_s = self._strikes.pop(peer, (0, 0.0))
        self._strikes[peer] = (strikes + 1 if now_s < ends_s else 1, now_s + self._quarantine_s)
        if len(self._strikes) > STRANGERS_MAX:
            del self._strikes[next(iter(self._strikes))]

    def check(self) -> None:
        """Raise `AssertionError` if too many connections are remembered."""
        assert len(self._strikes) <= STRANGERS_MAX
