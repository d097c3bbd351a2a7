"""How much one key may say to the hub. Without keys, one connection.

Over a bound a message is dropped before it costs much, and counted. A device that keeps to the protocol never
comes near a bound.
"""

from collections import Counter
from typing import Literal

from edgeasync.core.engine.token_bucket import Rate, TokenBucket

HEADER_BYTES_MAX = 1 << 14
"""The longest header that a hub reads: no message of a device needs half of it."""

MESSAGES = Rate(4_000.0, 8_000.0)
"""One connection that exchanges as fast as a hub can answer says fewer."""

HELLOS = Rate(8.0, 256.0)
"""The burst is for all agents under one key, after the hub's restart."""

STATUS_REQUESTS = Rate(1.0, 10.0)
OPERATOR_STATUS_REQUESTS = Rate(50.0, 100.0)

SENDERS_MAX = 16_384
"""How many senders are remembered; of more, who was first heard longest ago begins with full buckets again."""

Excess = Literal["header", "hellos", "messages", "status"]


class _Buckets:
    """What one sender may still say."""

    __slots__ = ("hellos", "messages", "status")

    def __init__(self, now_s: float, *, operator: bool) -> None:
        self.messages = TokenBucket(MESSAGES, now_s)
        self.hellos = TokenBucket(HELLOS, now_s)
        self.status = TokenBucket(OPERATOR_STATUS_REQUESTS if operator else STATUS_REQUESTS, now_s)


class MessageBounds:
    """Counts what senders say. `denied` counts what was dropped, by the bound."""

    def __init__(self) -> None:
        self.denied: Counter[Excess] = Counter()
        self._senders: dict[bytes, _Buckets] = {}

    def allows(self, sender: bytes, header_bytes: int, now_s: float, *, operator: bool = False) -> bool:
        """Return whether a sender may say one more message, whatever it is."""
        buckets = self._senders.get(sender)
        if buckets is None:
            buckets = self._senders[sender] = _Buckets(now_s, operator=operator)
            if len(self._senders) > SENDERS_MAX:
                del self._senders[next(iter(self._senders))]
        if header_bytes > HEADER_BYTES_MAX:
            self.denied["header"] += 1
        return self._count("messages", allowed=buckets.messages.take(now_s))

    def allows_hello(self, sender: bytes, now_s: float) -> bool:
        """Return whether a sender may say hello once more; `allows` comes first."""
        return self._count("hellos", allowed=self._senders[sender].hellos.take(now_s))

    def allows_status(self, sender: bytes, now_s: float) -> bool:
        """Return whether a sender may ask for the status once more; `allows` comes first."""
        return self._count("status", allowed=self._senders[sender].status.take(now_s))

    def _count(self, bound: Excess, *, allowed: bool) -> bool:
        if not allowed:
            self.denied[bound] += 1
        return allowed
