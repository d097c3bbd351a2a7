"""Counts malformed messages on connections that do not belong to a member."""

from edgeasync.core.hub.events import Peer

STRANGERS_MAX = 4096
"""Maximum number of connections without a member whose malformed messages are counted."""


class Strangers:
    """Malformed messages of the last `STRANGERS_MAX` connections or keys without a member.

    Each malformed message is a strike. A quarantine ends `quarantine_s` after the last strike, and
    earlier strikes do not extend it. So a replay, which does not contain earlier strikes, never
    refuses a device that the hub admitted.
    """

    def __init__(self, strikes_max: int, quarantine_s: float) -> None:
        self._strikes_max = strikes_max
        self._quarantine_s = quarantine_s
        self._strikes: dict[Peer, tuple[int, float]] = {}

    def remaining_s(self, peer: Peer, now_s: float) -> float:
        """Return for how many seconds a connection stays in quarantine, or 0."""
        strikes, ends_s = self._strikes.get(peer, (0, 0.0))
        return max(0.0, ends_s - now_s) if strikes >= self._strikes_max else 0.0

    def strike(self, peer: Peer, now_s: float) -> None:
        """Count a strike."""
        strikes, ends_s = self._strikes.pop(peer, (0, 0.0))
        self._strikes[peer] = (strikes + 1 if now_s < ends_s else 1, now_s + self._quarantine_s)
        if len(self._strikes) > STRANGERS_MAX:
            del self._strikes[next(iter(self._strikes))]

    def check(self) -> None:
        """Raise `AssertionError` if strikes of too many connections are stored."""
        assert len(self._strikes) <= STRANGERS_MAX
