"""Track addresses whose connections keep ending before their first message."""

from edgeasync.core.engine.token_bucket import Rate, TokenBucket

FAILURES = Rate(0.5, 64.0)
"""Rate of failed connections above which an address counts as failing.

A connection fails if it ends before its first message.
"""

ACCEPTED_OF_FAILING = Rate(200.0, 100.0)
"""Rate of accepted connections above which a failing address is blocked."""

HOLD_OFF_S = 0.5

ADDRESSES_MAX = 4096
"""Maximum number of tracked addresses."""


class _Address:
    """How many more failed connections, and how many more accepted ones, are allowed for an address."""

    __slots__ = ("accepted", "ended")

    def __init__(self, now_s: float) -> None:
        self.ended = TokenBucket(FAILURES, now_s)
        self.accepted = TokenBucket(ACCEPTED_OF_FAILING, now_s)


class FailingAddresses:
    """Counts the failed connections of each address. It is a part of `ConnectionBounds`.

    `held_off` maps each blocked address to the time at which its block ends.
    """

    def __init__(self) -> None:
        self.held_off: dict[str, float] = {}
        self._addresses: dict[str, _Address] = {}

    def is_failing(self, address: str, now_s: float) -> bool:
        """Return whether an address has too many failed connections."""
        known = self._addresses.get(address)
        return known is not None and known.ended.tokens(now_s) < 1.0

    def note_failure(self, address: str, now_s: float) -> None:
        """Count a failed connection for an address."""
        known = self._addresses.get(address)
        if known is None:
            known = self._addresses[address] = _Address(now_s)
            if len(self._addresses) > ADDRESSES_MAX:
                del self._addresses[next(iter(self._addresses))]
        known.ended.take(now_s)

    def holds_off(self, address: str, now_s: float) -> bool:
        """Count another connection from a failing address; return whether this blocks the address."""
        if self._addresses[address].accepted.take(now_s) or address in self.held_off:
            return False
        self.held_off[address] = now_s + HOLD_OFF_S
        return True

    def release(self, now_s: float) -> None:
        """Unblock addresses whose block has expired."""
        for address in [each for each, until_s in self.held_off.items() if until_s <= now_s]:
            del self.held_off[address]
