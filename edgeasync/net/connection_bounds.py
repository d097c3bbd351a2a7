"""Which connections a hub keeps: how many, how long they may be silent, and how much may lie unread on them.

No I/O and no clock: `Connections` tells what it sees, and shuts the connections that a method returns.

A connection whose key is not known yet counts for its address, from its first message on for its key. So a fleet
behind one router is held to no bound of the address once it speaks. Too many from an address that has not failed
before cost the oldest its place. An address whose connections keep ending unsaid keeps a few, the newest: a device
that shares the address with a flood still gets through its handshake.

Without keys an address proves nothing, since all devices of a machine share it: no bound is held against it.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from edgeasync.core.engine.token_bucket import Rate, TokenBucket
from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.settings import Limits
from edgeasync.durable.allow_list import Key
from edgeasync.net.curve import FRAME_BYTES
from edgeasync.protocol.transfers import CreditWindow
from edgeasync.protocol.wire import HEADER_BYTES_MAX as WIRE_HEADER_BYTES_MAX

STRANGERS_MAX = 2048
"""Connections that have said nothing yet."""

STRANGERS_OF_ADDRESS_MAX = 1024
"""The same of one address: a large fleet behind one router rejoins at once."""

SPARE_MAX = 1024
"""Connections that have spoken, beyond the devices: operators, and those that have not ended yet."""

STRANGERS_OF_FAILING_MAX = 64
"""The same of an address whose handshakes fail; the newest are kept, so that an honest handshake may still end."""

FAILURES = Rate(0.5, 64.0)
"""Connections of one address that end before they say anything, before it counts as failing."""

ACCEPTED_OF_FAILING = Rate(200.0, 100.0)
"""Connections that are accepted of an address that fails; over that it is held off."""

HOLD_OFF_S = 0.5

ADDRESSES_MAX = 4096
"""Addresses whose failures are remembered."""

HANDSHAKES = Rate(8.0, 256.0)
"""Handshakes of one key; the burst is for all its agents, after the hub's restart."""

SILENT_S = 30.0
"""How long a connection may say nothing at all; every peer has something to say as soon as it is in."""

IDLE_S_MIN = 60.0
"""How long a connection may be silent at least, and two leases."""

UNREAD_BYTES_MIN = 256 << 20
"""What may lie unread in both directions, for all connections together, at least."""

UNREAD_OF_ONE_MIN = 16 << 20
"""What may lie unread on one connection, at least."""

HANDSHAKE_BYTES = 1 << 12
HEARTBEAT_BYTES_PER_S = 64.0
"""What ZeroMQ's own messages may be: they are received, but never delivered."""

MESSAGE_SLACK_BYTES = 1 << 17
"""What libzmq may have read of one connection beside the payload of a message that is not whole yet."""

PART_BYTES = 64
"""What a frame costs libzmq beside its bytes, while its message is not whole."""

WEIGHED_BYTES = 1 << 21
"""A connection is looked at again after this number of delivered bytes."""

SMALL_BYTES = 1 << 16
"""Less than this is on its way on any connection that works."""

Reason = Literal["connections", "files", "frames", "header", "messages", "silent", "unread"]


class Connection(msgspec.Struct, eq=False):
    """A connection. `key` is unknown until its first message came; empty where there are no keys.

    `delivered_bytes` and `sent_bytes` are of whole messages, as they travel. Of what was sent libzmq may hold
    copies of `copied_bytes`. At the last look libzmq had read `taken_bytes`, and the hub had read everything that
    was whole `emptied` times.
    """

    descriptor: int
    address: str
    accepted_s: float
    far_end: Any = None
    key: Key | None = None
    peer: Peer = b""
    heard_s: float = 0.0
    heard: bool = False
    shut: bool = False
    enrols: bool = False
    delivered_bytes: int = 0
    looked_bytes: int = 0
    weighed_bytes: int = 0
    sent_bytes: int = 0
    copied_bytes: int = 0
    unread_bytes: int = 0
    taken_bytes: int = 0
    emptied: int = 0


ToClose = tuple[Connection, Reason]


def unread_bytes_max(limits: Limits) -> int:
    """Return what may lie unread on all connections together: more where pieces are large."""
    return max(UNREAD_BYTES_MIN, 4 * CreditWindow(int(limits.piece_bytes)).bytes_max)


class _Failures:
    """What an address has left: connections that may end unsaid, and connections that are accepted after that."""

    __slots__ = ("accepted", "ended")

    def __init__(self, now_s: float) -> None:
        self.ended = TokenBucket(FAILURES, now_s)
        self.accepted = TokenBucket(ACCEPTED_OF_FAILING, now_s)


class ConnectionBounds:
    """Keeps the books on the connections. `denied` counts what was shut, by the reason.

    There are descriptors for `files_max` connections: over that the oldest that has said nothing is shut. Those
    that have spoken are as many as devices, and some that have not ended yet.
    """

    def __init__(self, limits: Limits, *, lease_s: float, files_max: int, by_address: bool) -> None:
        self.denied: Counter[str] = Counter()
        self._connections_max = limits.devices_max + SPARE_MAX
        self._connections_per_key_max = limits.connections_per_key_max
        self._files_max = files_max
        self._idle_s = max(IDLE_S_MIN, 2.0 * lease_s)
        self._by_address = by_address
        # A device may have a whole window in flight while the hub is busy with something else.
        self._unread_of_one_max = max(UNREAD_OF_ONE_MIN, 2 * CreditWindow(int(limits.piece_bytes)).bytes_max)
        self._unread_max = unread_bytes_max(limits)
        self._parts_factor = PART_BYTES / (FRAME_BYTES + 2) if by_address else 0.0
        """Memory for a byte of empty frames under keys; without keys it is 32 bytes, and not counted."""
        self._message_max = max(WIRE_HEADER_BYTES_MAX, int(limits.piece_bytes)) + MESSAGE_SLACK_BYTES
        self._strangers: dict[int, Connection] = {}
        self._strangers_of: defaultdict[str, dict[int, Connection]] = defaultdict(dict)
        self._spoken: dict[int, Connection] = {}
        self._of_key: Counter[Key] = Counter()
        self.held_off: dict[str, float] = {}
        """Addresses that must not connect, and until when."""
        self._failures: dict[str, _Failures] = {}
        self._handshakes: dict[Key, TokenBucket] = {}
        self._unread: dict[int, Connection] = {}
        self._unread_bytes = 0

    # -- they come and go ------------------------------------------------------------------------------------

    def accepted(self, new: Connection, now_s: float) -> list[ToClose]:
        """Note a new connection; return those to shut, so that there are not too many.

        Where there are far too many, because fewer are allowed by now, that is two for each new one.
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
        """Note the first message of a connection; return the connection if its key has too many."""
        self._forget_stranger(connection)
        connection.key = key
        self._spoken[connection.descriptor] = connection
        self._of_key[key] += 1
        too_many = bool(key) and self._of_key[key] > self._connections_per_key_max
        if too_many or len(self._spoken) > self._connections_max:
            return self._to_close(connection, "connections")
        return None

    def said_too_much(self, connection: Connection, reason: Reason) -> ToClose | None:
        """Return a connection that says what it must not, to be shut, unless it is being shut."""
        return None if connection.shut else self._to_close(connection, reason)

    def closed(self, connection: Connection, now_s: float) -> None:
        """Note that a connection has ended; for one that has said nothing its address is blamed."""
        self._forget_unread(connection)
        if connection.key is not None:
            self._forget_spoken(connection)
            return
        self._forget_stranger(connection)
        if self._counts(connection.address):
            self._failed(connection.address, now_s)

    def release(self, now_s: float) -> None:
        """Let addresses connect again that were held off long enough."""
        for address in [each for each, until_s in self.held_off.items() if until_s <= now_s]:
            del self.held_off[address]

    def allows_handshake(self, key: Key, now_s: float) -> bool:
        """Return whether a key of the list may shake hands once more."""
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
        """Yield the connections that have said nothing since they were accepted, for too long."""
        for connection in [*self._strangers.values()]:
            if connection.accepted_s > now_s - SILENT_S:
                break  # all others are younger
            yield self._to_close(connection, "silent")

    def idle(self, now_s: float) -> Iterator[ToClose]:
        """Yield the connections that have been silent too long; this walks over all."""
        for connection in [*self._spoken.values()]:
            if connection.heard:
                connection.heard, connection.heard_s = False, now_s
            elif connection.heard_s < now_s - self._idle_s and not connection.shut:
                yield self._to_close(connection, "silent")

    # -- what lies unread ------------------------------------------------------------------------------------

    @property
    def unread(self) -> Iterable[Connection]:
        """The connections on which something lay unread when they were looked at."""
        return self._unread.values()

    def needs_look(self, connection: Connection) -> bool:
        """Return whether a connection on which bytes arrived may hold more than it should.

        Of a message that does not end nothing is ever delivered.
        """
        before, delivered = connection.looked_bytes, connection.delivered_bytes
        connection.looked_bytes = delivered
        much = delivered - connection.weighed_bytes > WEIGHED_BYTES or connection.copied_bytes > SMALL_BYTES
        return much or delivered == before

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
        """Note what the kernel has received on a connection, and what the far end has of what was sent to it.

        libzmq has read `taken_bytes` of it, and the hub has read all whole messages `emptied` times. If it did so
        since the last look, then what libzmq had at that look and is still not delivered is one message that is
        not whole. It may be as long as a message. It may be all empty frames, which cost more than their bytes.

        Return the connection to shut if too much lies unread on it, or the worst one if it is too much on all.
        """
        age_s = now_s - connection.accepted_s
        own_bytes = HANDSHAKE_BYTES + int(HEARTBEAT_BYTES_PER_S * age_s)
        connection.delivered_bytes = min(connection.delivered_bytes, received_bytes)
        if connection.sent_bytes - acknowledged_bytes < SMALL_BYTES:
            connection.copied_bytes = 0
        incoming = max(0, received_bytes - connection.delivered_bytes - own_bytes)
        connection.looked_bytes = connection.weighed_bytes = connection.delivered_bytes
        begun_bytes = connection.taken_bytes - connection.delivered_bytes - own_bytes
        if emptied <= connection.emptied or begun_bytes < 0:
            begun_bytes = 0
        connection.taken_bytes, connection.emptied = taken_bytes, emptied
        unread_bytes = incoming + connection.copied_bytes
        self._forget_unread(connection)
        if unread_bytes <= SMALL_BYTES or connection.shut:
            return None
        is_too_much = unread_bytes > self._unread_of_one_max or begun_bytes > self._message_max
        unread_bytes += int(self._parts_factor * begun_bytes)
        connection.unread_bytes = unread_bytes
        self._unread[connection.descriptor] = connection
        self._unread_bytes += unread_bytes
        if is_too_much:
            return self._to_close(connection, "unread")
        if self._unread_bytes > self._unread_max:
            return self._to_close(max(self._unread.values(), key=lambda each: each.unread_bytes), "unread")
        return None

    # -- inside ----------------------------------------------------------------------------------------------

    def _to_close(self, connection: Connection, reason: Reason) -> ToClose:
        """Count a connection that is to be shut; it no longer counts for its address."""
        connection.shut = True
        self.denied[reason] += 1
        self._forget_stranger(connection)
        self._forget_unread(connection)
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

    def _forget_unread(self, connection: Connection) -> None:
        if self._unread.get(connection.descriptor) is connection:
            del self._unread[connection.descriptor]
            self._unread_bytes -= connection.unread_bytes
            connection.unread_bytes = 0

    def _counts(self, address: str) -> bool:
        """Return whether bounds of addresses count; one that is not known had gone before it could be asked."""
        return self._by_address and bool(address)

    def _strangers_max(self, address: str, now_s: float) -> int:
        """Return how many connections an address may have that say nothing; hold it off if it comes too often."""
        if not self._is_failing(address, now_s):
            return STRANGERS_OF_ADDRESS_MAX
        if not self._failures[address].accepted.take(now_s) and address not in self.held_off:
            self.held_off[address] = now_s + HOLD_OFF_S
            self.denied["address"] += 1
        return STRANGERS_OF_FAILING_MAX

    def _is_failing(self, address: str, now_s: float) -> bool:
        failures = self._failures.get(address)
        return failures is not None and failures.ended.tokens(now_s) < 1.0

    def _failed(self, address: str, now_s: float) -> None:
        failures = self._failures.get(address)
        if failures is None:
            failures = self._failures[address] = _Failures(now_s)
            if len(self._failures) > ADDRESSES_MAX:
                del self._failures[next(iter(self._failures))]
        failures.ended.take(now_s)
