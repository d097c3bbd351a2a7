"""How much may lie unread on a hub's connections, by what the kernel has received and the hub was given."""

from typing import Any

import msgspec

from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.settings import Limits
from edgeasync.durable.allow_list import Key
from edgeasync.net.curve import FRAME_BYTES
from edgeasync.protocol.transfers import CreditWindow
from edgeasync.protocol.wire import HEADER_BYTES_MAX as WIRE_HEADER_BYTES_MAX

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


class UnreadBytes:
    """What lies unread on each connection, and on all together. Part of `ConnectionBounds`.

    `connections` are those on which something lay unread when they were looked at.
    """

    def __init__(self, limits: Limits, *, encrypted: bool) -> None:
        self.connections: dict[int, Connection] = {}
        self._total_bytes = 0
        # A device may have a whole window in flight while the hub is busy with something else.
        self._of_one_max = max(UNREAD_OF_ONE_MIN, 2 * CreditWindow(int(limits.piece_bytes)).bytes_max)
        self._of_all_max = unread_bytes_max(limits)
        self._parts_factor = PART_BYTES / (FRAME_BYTES + 2) if encrypted else 0.0
        """Memory for a byte of empty frames under keys; without keys it is 32 bytes, and not counted."""
        self._message_max = max(WIRE_HEADER_BYTES_MAX, int(limits.piece_bytes)) + MESSAGE_SLACK_BYTES

    def weigh(
        self,
        connection: Connection,
        received_bytes: int,
        acknowledged_bytes: int,
        now_s: float,
        *,
        taken_bytes: int,
        emptied: int,
    ) -> Connection | None:
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
        self.forget(connection)
        if unread_bytes <= SMALL_BYTES or connection.shut:
            return None
        is_too_much = unread_bytes > self._of_one_max or begun_bytes > self._message_max
        unread_bytes += int(self._parts_factor * begun_bytes)
        connection.unread_bytes = unread_bytes
        self.connections[connection.descriptor] = connection
        self._total_bytes += unread_bytes
        if is_too_much:
            return connection
        if self._total_bytes > self._of_all_max:
            return max(self.connections.values(), key=lambda each: each.unread_bytes)
        return None

    def forget(self, connection: Connection) -> None:
        """Note that nothing lies unread on a connection, or nothing that counts."""
        if self.connections.get(connection.descriptor) is connection:
            del self.connections[connection.descriptor]
            self._total_bytes -= connection.unread_bytes
            connection.unread_bytes = 0


def needs_look(connection: Connection) -> bool:
    """Return whether a connection on which bytes arrived may hold more than it should.

    Of a message that does not end nothing is ever delivered.
    """
    before, delivered = connection.looked_bytes, connection.delivered_bytes
    connection.looked_bytes = delivered
    much = delivered - connection.weighed_bytes > WEIGHED_BYTES or connection.copied_bytes > SMALL_BYTES
    return much or delivered == before


def unread_bytes_max(limits: Limits) -> int:
    """Return what may lie unread on all connections together: more where pieces are large."""
    return max(UNREAD_BYTES_MIN, 4 * CreditWindow(int(limits.piece_bytes)).bytes_max)
