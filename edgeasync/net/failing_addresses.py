"""Addresses whose connections keep ending before they say anything."""

from edgeasync.core.engine.token_bucket import Rate, TokenBucket

FAILURES = Rate(0.5, 64.0)
"""Connections of one address that end before they say anything, before it counts as failing."""

ACCEPTED_OF_FAILING = Rate(200.0, 100.0)
"""Connections that are accepted of an address that fails; over that it is held off."""

HOLD_OFF_S = 0.5

ADDRESSES_MAX = 4096
"""Addresses whose failures are remembered."""


class _Address:
    """What an address has left: connections that may end unsaid, and connections that are accepted after that."""

    __slots__ = ("accepted", "ended")

    def __init__(self, now_s: float) -> None:
        self.ended = TokenBucket(FAILURES, now_s)
        self.accepted = TokenBucket(ACCEPTED_OF_FAILING, now_s)


class FailingAddresses:
    """Blames addresses for connections that end unsaid. Part of `ConnectionBounds`.

    `held_off` are those that must not connect, and until when.
    """

    def __init__(self) -> None:
        self.held_off: dict[str, float] = {}
        self._addresses: dict[str, _Address] = {}

    def is_failing(self, address: str, now_s: float) -> bool:
        """Return whether too many connections of an address have ended unsaid."""
        known = self._addresses.get(address)
        return known is not None and known.ended.tokens(now_s) < 1.0

    def note_failure(self, address: str, now_s: float) -> None:
        """Note that a connection of an address has ended unsaid."""
        known = self._addresses.get(address)
        if known is None:
            known = self._addresses[address] = _Address(now_s)
            if len(self._addresses) > ADDRESSES_MAX:
                del self._addresses[next(iter(self._addresses))]
        known.ended.take(now_s)

    def holds_off(self, address: str, now_s: float) -> bool:
        """Count another connection of an address that fails; return whether it is held off from now on."""
        if self._addresses[address].accepted.take(now_s) or address in self.held_off:
            return False
        self.held_off[address] = now_s + HOLD_OFF_S
        return True

    def release(self, now_s: float) -> None:
        """Let addresses connect again that were held off long enough."""
        for address in [each for each, until_s in self.held_off.items() if until_s <= now_s]:
            del self.held_off[address]
