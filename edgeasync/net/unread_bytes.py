"""Limit the unread bytes of a hub's connections, from the kernel's and the hub's byte counts."""

from typing import Any

import msgspec

from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.settings import Limits
from edgeasync.durable.allow_list import Key
from edgeasync.net.curve import FRAME_BYTES
from edgeasync.protocol.transfers import CreditWindow
from edgeasync.protocol.wire import HEADER_BYTES_MAX as WIRE_HEADER_BYTES_MAX

UNREAD_BYTES_MIN = 256 << 20
"""Minimum limit of unread bytes in both directions, for all connections together."""

UNREAD_OF_ONE_MIN = 16 << 20
"""Minimum limit of unread bytes of one connection."""

HANDSHAKE_BYTES = 1 << 12
HEARTBEAT_BYTES_PER_S = 64.0
"""Limit of ZeroMQ's own messages, which are received but never delivered."""

MESSAGE_SLACK_BYTES = 1 << 17
"""Bytes that libzmq may have read of a connection beyond the payload of an incomplete message."""

PART_BYTES = 64
"""Memory of libzmq per frame of an incomplete message, in addition to its bytes."""

WEIGHED_BYTES = 1 << 21
"""Delivered bytes after which a connection is checked again."""

SMALL_BYTES = 1 << 16
"""Fewer bytes are always in transit on a working connection."""


class Connection(msgspec.Struct, eq=False):
    """A connection. `key` is `None` until its first message, and empty without keys.

    `delivered_bytes` and `sent_bytes` count whole messages as on the wire. libzmq may hold copies
    of `copied_bytes` of the sent ones. At the last check, libzmq had read `taken_bytes`, and the
    hub had read all complete messages `emptied` times.
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
    """The unread bytes of each connection, and of all together. Part of `ConnectionBounds`.

    `connections` are those that had unread bytes at the last check.
    """

    def __init__(self, limits: Limits, *, encrypted: bool) -> None:
        self.connections: dict[int, Connection] = {}
        self._total_bytes = 0
        # A device may have a whole window in flight while the hub is busy.
        self._of_one_max = max(UNREAD_OF_ONE_MIN, 2 * CreditWindow(int(limits.piece_bytes)).bytes_max)
        self._of_all_max = unread_bytes_max(limits)
        self._parts_factor = PART_BYTES / (FRAME_BYTES + 2) if encrypted else 0.0
        """Memory per byte of empty frames with keys; without keys it is 32 bytes, and not counted.
        """
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
        """Record the byte counts of a connection; return a connection to close, if any.

        The kernel has received `received_bytes` on it, and the peer has acknowledged
        `acknowledged_bytes`. libzmq has read `taken_bytes` of the received ones, and the hub has
        read all complete messages `emptied` times. If that happened since the last check, all bytes
        that libzmq had at that check and that are still undelivered belong to one incomplete
        message. It may have the maximum length. It may consist of empty frames, which need more
        memory than their bytes.

        If this connection has too many unread bytes, it is the one to close. If all connections
        together have too many, it is the connection with the most unread bytes.
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
        """Stop counting the unread bytes of a connection."""
        if self.connections.get(connection.descriptor) is connection:
            del self.connections[connection.descriptor]
            self._total_bytes -= connection.unread_bytes
            connection.unread_bytes = 0


def needs_look(connection: Connection) -> bool:
    """Return whether a connection that received bytes may have too many unread ones.

    An endless message is never delivered.
    """
    before, delivered = connection.looked_bytes, connection.delivered_bytes
    connection.looked_bytes = delivered
    much = delivered - connection.weighed_bytes > WEIGHED_BYTES or connection.copied_bytes > SMALL_BYTES
    return much or delivered == before


def unread_bytes_max(limits: Limits) -> int:
    """Return the limit for all connections together, which is higher for large pieces."""
    return max(UNREAD_BYTES_MIN, 4 * CreditWindow(int(limits.piece_bytes)).bytes_max)
