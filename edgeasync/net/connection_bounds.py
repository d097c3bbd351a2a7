"""Limit the connections of a hub: their number, their idle time and their unread bytes.

This module has no I/O and no clock. `Connections` reports events to it, and closes the connections
that its methods return.

Before its first message, a connection counts towards the limit of its address, and afterwards
towards the limit of its key. So the devices behind one router are no longer limited by their shared
address once they have sent a message. If an address without failures has too many connections, the
oldest one is closed. If connections from an address keep ending before their first message, only a
few of its newest connections are kept. So a device that shares its address with an attacker can
still complete its handshake.

Without keys, all devices on a machine share an address, so there are no limits per address.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Literal

from edgeasync.core.engine.token_bucket import Rate, TokenBucket
from edgeasync.core.hub.settings import Limits
from edgeasync.durable.allow_list import Key
from edgeasync.net.failing_addresses import ADDRESSES_MAX, FailingAddresses
from edgeasync.net.unread_bytes import Connection, UnreadBytes

STRANGERS_MAX = 2048
"""Maximum number of connections that have not sent a message yet."""

STRANGERS_OF_ADDRESS_MAX = 1024
"""Maximum number of connections per address that have not sent a message yet.

It is high, because all devices behind one router may reconnect at once.
"""

SPARE_MAX = 1024
"""Maximum number of connections that have sent a message, in addition to the number of devices.

It allows for operators, and for connections that are about to end.
"""

STRANGERS_OF_FAILING_MAX = 64
"""Maximum number of connections without a message, for an address whose handshakes keep failing.

The newest ones are kept, so that an honest device can still complete its handshake.
"""

HANDSHAKES = Rate(8.0, 256.0)
"""Maximum rate of handshakes per key.

The burst allows all agents of a key to reconnect after the hub has restarted.
"""

SILENT_S = 30.0
"""Maximum time between a connection and its first message.

Every peer sends a message right after the handshake.
"""

IDLE_S_MIN = 60.0
"""Minimum value of the idle timeout. The timeout is two leases if that is longer."""

Reason = Literal["connections", "files", "frames", "header", "messages", "silent", "unread"]


ToClose = tuple[Connection, Reason]


class ConnectionBounds:
    """Tracks the connections. `denied` counts closed connections by reason.

    The process has descriptors for `files_max` connections. If more connections are open, the
    oldest connection without a message is closed. The number of connections that have sent a
    message is limited to the number of devices plus `SPARE_MAX`.
    """

    def __init__(self, limits: Limits, *, lease_s: float, files_max: int, by_address: bool) -> None:
        self.denied: Counter[str] = Counter()
        self._connections_max = limits.devices_max + SPARE_MAX
        self._connections_per_key_max = limits.connections_per_key_max
        self._files_max = files_max
        self._idle_s = max(IDLE_S_MIN, 2.0 * lease_s)
        self._by_address = by_address
        self._strangers: dict[int, Connection] = {}
        self._strangers_of: defaultdict[str, dict[int, Connection]] = defaultdict(dict)
        self._spoken: dict[int, Connection] = {}
        self._of_key: Counter[Key] = Counter()
        self.failing = FailingAddresses()
        self._handshakes: dict[Key, TokenBucket] = {}
        self.unread = UnreadBytes(limits, encrypted=by_address)

    # -- events of connections ----------------------------------------------------------------------------------

    def accepted(self, new: Connection, now_s: float) -> list[ToClose]:
        """Record a new connection; return the connections to close if there are too many.

        If the limit has dropped far below the number of connections, two of them are closed for
        each new connection.
        """
        new.heard_s = now_s
        self._strangers[new.descriptor] = new
        of_address = self._strangers_of[new.address]
        of_address[new.descriptor] = new
        if len(self._strangers) + len(self._spoken) > self._files_max:
            return [self._to_close(next(iter(self._strangers.values())), "files")]
        if len(self._strangers) > STRANGERS_MAX:
            return [self._to_close(next(iter(self._strangers.values())), "connections")]
        if not self._counts(new.address):
            return []
        excess = len(of_address) - self._strangers_max(new.address, now_s)
        oldest = [*itertools.islice(of_address.values(), max(0, min(excess, 2)))]
        return [self._to_close(connection, "connections") for connection in oldest]

    def spoke(self, connection: Connection, key: Key) -> ToClose | None:
        """Record the first message of a connection; return the connection if a limit is exceeded."""
        self._forget_stranger(connection)
        connection.key = key
        self._spoken[connection.descriptor] = connection
        self._of_key[key] += 1
        too_many = bool(key) and self._of_key[key] > self._connections_per_key_max
        if too_many or len(self._spoken) > self._connections_max:
            return self._to_close(connection, "connections")
        return None

    def said_too_much(self, connection: Connection, reason: Reason) -> ToClose | None:
        """Return a connection that exceeded a limit, unless it is already being closed."""
        return None if connection.shut else self._to_close(connection, reason)

    def closed(self, connection: Connection, now_s: float) -> None:
        """Record the end of a connection. If it sent no message, count a failure for its address."""
        self.unread.forget(connection)
        if connection.key is not None:
            self._forget_spoken(connection)
            return
        self._forget_stranger(connection)
        if self._counts(connection.address):
            self.failing.note_failure(connection.address, now_s)

    def allows_handshake(self, key: Key, now_s: float) -> bool:
        """Return whether a key in the list may start another handshake now."""
        bucket = self._handshakes.get(key)
        if bucket is None:
            bucket = self._handshakes[key] = TokenBucket(HANDSHAKES, now_s)
            if len(self._handshakes) > ADDRESSES_MAX:
                del self._handshakes[next(iter(self._handshakes))]
        allowed = bucket.take(now_s)
        if not allowed:
            self.denied["handshakes"] += 1
        return allowed

    def silent(self, now_s: float) -> Iterator[ToClose]:
        """Yield the connections that were accepted too long ago and have not sent a message since."""
        for connection in [*self._strangers.values()]:
            if connection.accepted_s > now_s - SILENT_S:
                break  # all others are newer
            yield self._to_close(connection, "silent")

    def idle(self, now_s: float) -> Iterator[ToClose]:
        """Yield the connections whose last message is too old. This checks all connections."""
        for connection in [*self._spoken.values()]:
            if connection.heard:
                connection.heard, connection.heard_s = False, now_s
            elif connection.heard_s < now_s - self._idle_s and not connection.shut:
                yield self._to_close(connection, "silent")

    def weigh(
        self,
        connection: Connection,
        received_bytes: int,
        acknowledged_bytes: int,
        now_s: float,
        *,
        taken_bytes: int = 0,
        emptied: int = 0,
    ) -> ToClose | None:
        """Record the byte counts of a connection; return a connection to close, if any.

        For the arguments, see `UnreadBytes.weigh`.
        """
        excess = self.unread.weigh(
            connection, received_bytes, acknowledged_bytes, now_s, taken_bytes=taken_bytes, emptied=emptied
        )
        return None if excess is None else self._to_close(excess, "unread")

    # -- inside ----------------------------------------------------------------------------------------------

    def _to_close(self, connection: Connection, reason: Reason) -> ToClose:
        """Record that a connection is to be closed.

        It no longer counts towards its address's limit.
        """
        connection.shut = True
        self.denied[reason] += 1
        self._forget_stranger(connection)
        self.unread.forget(connection)
        return connection, reason

    def _forget_stranger(self, connection: Connection) -> None:
        if self._strangers.get(connection.descriptor) is not connection:
            return
        del self._strangers[connection.descriptor]
        of_address = self._strangers_of[connection.address]
        del of_address[connection.descriptor]
        if not of_address:
            del self._strangers_of[connection.address]

    def _forget_spoken(self, connection: Connection) -> None:
        if self._spoken.get(connection.descriptor) is not connection:
            return
        del self._spoken[connection.descriptor]
        assert connection.key is not None
        self._of_key[connection.key] -= 1
        if not self._of_key[connection.key]:
            del self._of_key[connection.key]

    def _counts(self, address: str) -> bool:
        """Return whether the limits per address apply to an address.

        The address is empty if the peer disconnected immediately.
        """
        return self._by_address and bool(address)

    def _strangers_max(self, address: str, now_s: float) -> int:
        """Return the maximum number of connections without a message for an address.

        If the address connects too often, block it for a while.
        """
        if not self.failing.is_failing(address, now_s):
            return STRANGERS_OF_ADDRESS_MAX
        if self.failing.holds_off(address, now_s):
            self.denied["address"] += 1
        return STRANGERS_OF_FAILING_MAX
