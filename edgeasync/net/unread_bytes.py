"""Limit the unread bytes of a hub's connections.

They are computed from the byte counts of the kernel and of the hub.
"""

from typing import Any

import msgspec

from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.settings import Limits
from edgeasync.durable.allow_list import Key
from edgeasync.net.curve import FRAME_BYTES
from edgeasync.protocol.transfers import CreditWindow
from edgeasync.protocol.wire import HEADER_BYTES_MAX as WIRE_HEADER_BYTES_MAX

UNREAD_BYTES_MIN = 256 << 20
"""Minimum value of the limit for the unread bytes of all connections, in both directions."""

UNREAD_OF_ONE_MIN = 16 << 20
"""Minimum value of the limit for the unread bytes of one connection."""

HANDSHAKE_BYTES = 1 << 12
HEARTBEAT_BYTES_PER_S = 64.0
"""Maximum rate of ZeroMQ's own messages, which are received but never delivered."""

MESSAGE_SLACK_BYTES = 1 << 17
"""Number of bytes that libzmq may read from a connection in addition to an incomplete message."""

PART_BYTES = 64
"""Memory in bytes that libzmq needs per frame of an incomplete message, in addition to its content."""

WEIGHED_BYTES = 1 << 21
"""Number of delivered bytes after which a connection is checked again."""

SMALL_BYTES = 1 << 16
"""Connections with at most this many unread bytes are ignored.

On a working connection, that many bytes are always in transit.
"""


class Connection(msgspec.Struct, eq=False):
    """A connection. `key` is `None` until its first message, and empty without keys.

    `delivered_bytes` and `sent_bytes` count whole messages, including their overhead on the wire.
    libzmq may still store copies of `copied_bytes` of the sent bytes. `taken_bytes` is the number
    of bytes that libzmq had read at the last check. `emptied` is the number of times that the hub
    had read the socket until it was empty, before that check.
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
    """The unread bytes of each connection, and of all connections.

    It is a part of `ConnectionBounds`.

    `connections` contains the connections that had unread bytes at the last check.
    """

    def __init__(self, limits: Limits, *, encrypted: bool) -> None:
        self.connections: dict[int, Connection] = {}
        self._total_bytes = 0
        # A device may have a whole window in flight while the hub is busy.
        self._of_one_max = max(UNREAD_OF_ONE_MIN, 2 * CreditWindow(int(limits.piece_bytes)).bytes_max)
        self._of_all_max = unread_bytes_max(limits)
        self._parts_factor = PART_BYTES / (FRAME_BYTES + 2) if encrypted else 0.0
        """Memory that libzmq needs for empty frames with encryption, per byte received.

        Without encryption, the memory for empty frames is 32 bytes per byte and is not counted.
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

        `received_bytes` is the number of bytes that the kernel has received on the connection, and
        `acknowledged_bytes` is the number of sent bytes that the peer has acknowledged. libzmq has
        read `taken_bytes` of the received bytes. `emptied` is the number of times that the hub has
        read the socket until it was empty. If `emptied` has increased since the last check, all
        messages that were complete at that check have been delivered. The undelivered bytes that
        libzmq had read by then belong to a single incomplete message. They are limited to the
        maximum length of a message. They may be empty frames, which need more memory than they have
        bytes.

        If this connection has too many unread bytes, it is returned. If all connections together
        have too many, the connection with the most unread bytes is returned.
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
    """Return whether a connection that received bytes may have too many unread bytes.

    This is the case if no message was delivered since the last call, because an endless message is
    never delivered.
    """
    before, delivered = connection.looked_bytes, connection.delivered_bytes
    connection.looked_bytes = delivered
    much = delivered - connection.weighed_bytes > WEIGHED_BYTES or connection.copied_bytes > SMALL_BYTES
    return much or delivered == before


def unread_bytes_max(limits: Limits) -> int:
    """Return the limit for all connections together. Larger pieces raise it."""
    return max(UNREAD_BYTES_MIN, 4 * CreditWindow(int(limits.piece_bytes)).bytes_max)
