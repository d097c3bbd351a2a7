"""Limits the rate of messages per key or, without keys, per connection.

A device that follows the protocol never reaches a limit. A message that exceeds a limit is dropped
and counted. The shell closes connections that send too much.
"""

from collections import Counter
from typing import Literal

from edgeasync.core.engine.sender import Sender
from edgeasync.core.engine.token_bucket import Rate, TokenBucket
from edgeasync.core.hub.events import Peer
from edgeasync.protocol.messages import FindPeers, Hello, Message, Order, StatusRequest, Wake

HEADER_BYTES_MAX = 1 << 14
"""Maximum header length. Messages of devices use less than half of it."""

MESSAGES = Rate(10_000.0, 20_000.0)
"""Maximum rate of messages per connection, including pieces and credits."""

LONG_BYTES = 512
TOKEN_BYTES = 64
"""A header of at least `LONG_BYTES` counts as one message per `TOKEN_BYTES`.

Decoding a header of 16 KiB may take 5 ms.
"""

HELLOS = Rate(8.0, 256.0)
"""Maximum rate of `Hello` messages. The burst allows all agents under one key to reconnect after
the hub restarts.
"""

STATUS_REQUESTS = Rate(1.0, 10.0)
OPERATOR_STATUS_REQUESTS = Rate(50.0, 100.0)

SENDERS_MAX = 16_384
"""Maximum number of senders whose messages are counted. Above it, the entry of the oldest sender is
dropped, so that this sender starts again with full buckets.
"""

Excess = Literal["hellos", "status"]


class _Buckets:
    """The remaining allowances of one sender."""

    __slots__ = ("hellos", "messages", "operator_status", "status")

    def __init__(self, now_s: float) -> None:
        self.messages = TokenBucket(MESSAGES, now_s)
        self.hellos = TokenBucket(HELLOS, now_s)
        self.status = TokenBucket(STATUS_REQUESTS, now_s)
        self.operator_status = TokenBucket(OPERATOR_STATUS_REQUESTS, now_s)


class MessageBounds:
    """Limits the rate of messages of each sender.

    `denied` counts the hellos and status requests that were dropped.
    """

    def __init__(self) -> None:
        self.denied: Counter[Excess] = Counter()
        self._senders: dict[bytes, _Buckets] = {}

    def allows(self, sender: bytes, now_s: float, header_bytes: int = 0) -> bool:
        """Return whether a sender may send one more message of any kind."""
        count = 1 if header_bytes < LONG_BYTES else header_bytes // TOKEN_BYTES
        return self._of(sender, now_s).messages.take(now_s, count)

    def allows_hello(self, sender: bytes, now_s: float) -> bool:
        """Return whether a sender may send one more `Hello`."""
        return self._count("hellos", allowed=self._of(sender, now_s).hellos.take(now_s))

    def allows_status(self, sender: bytes, now_s: float, *, operator: bool) -> bool:
        """Return whether a sender may send one more status request."""
        buckets = self._of(sender, now_s)
        bucket = buckets.operator_status if operator else buckets.status
        return self._count("status", allowed=bucket.take(now_s))

    def is_too_often(self, message: Message, peer: Peer, sender: Sender, now_s: float) -> bool:
        """Return whether a message exceeds the limit of its sender, and so must be dropped."""
        who = sender.key or peer
        if isinstance(message, (Hello, FindPeers)):
            return not self.allows_hello(who, now_s)
        if isinstance(message, (StatusRequest, Wake, Order)):
            return not self.allows_status(who, now_s, operator=sender.role == "operator")
        return False

    def _of(self, sender: bytes, now_s: float) -> _Buckets:
        buckets = self._senders.get(sender)
        if buckets is None:
            buckets = self._senders[sender] = _Buckets(now_s)
            if len(self._senders) > SENDERS_MAX:
                del self._senders[next(iter(self._senders))]
        return buckets

    def _count(self, bound: Excess, *, allowed: bool) -> bool:
        if not allowed:
            self.denied[bound] += 1
        return allowed
