"""Track the connections of a hub's socket with its monitor and the kernel, for `ConnectionBounds`.

libzmq authorizes a key only once per connection. So after a revocation, the hub itself shuts down
the connection's descriptor. libzmq may have closed the descriptor a moment before, and its number
may already belong to another connection. So the hub shuts the descriptor down only if the remote
address is still that of the accepted connection.

libzmq buffers the frames of a message until the last frame arrives. It neither limits nor reports
the size of this buffer. But the kernel counts the received bytes of a connection, and the hub
counts the delivered bytes. Connections that receive bytes are checked every `LOOK_S` seconds. No
check runs while no bytes arrive.

A forked child closes its copies of the listening socket and of all connections. Otherwise a child
that outlives this process would keep the port in use, and remote peers would not notice that the
hub has ended.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import resource
import select
import socket
import struct
import sys
import termios
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import zmq

from edgeasync.core.engine.message_bounds import HEADER_BYTES_MAX
from edgeasync.core.hub.events import Peer
from edgeasync.durable.allow_list import Key
from edgeasync.net.channel import Channel
from edgeasync.net.connection_bounds import ConnectionBounds, ToClose
from edgeasync.net.curve import FRAME_BYTES
from edgeasync.net.listener_filter import AddressBarrier, ListenerFilter
from edgeasync.net.router_monitor import EVENTS_AT_A_TIME, RouterMonitor
from edgeasync.net.routing_ids import RoutingIds
from edgeasync.net.unread_bytes import Connection, needs_look

LOOK_S = 0.03
"""Minimum time between two checks of unread bytes."""

SWEEP_S = 1.0
IDLE_SWEEPS = 10
"""Number of sweeps after which the hub looks for idle connections."""

_FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "plain",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "hub_key",
}

_TCP_INFO_BYTES = 136
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_AT = 120
"""Offset of `tcpi_bytes_acked` and `tcpi_bytes_received` in Linux's `tcp_info`."""


FILES_KEPT = 128
"""Number of descriptors that are reserved for the journal, checkpoints and libraries."""


def connections_that_fit() -> int:
    """Return the number of connections for which the process has enough descriptors.

    If the limit of descriptors is low, a quarter of them is reserved for other files.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 31 if soft == resource.RLIM_INFINITY else max(1, soft - max(32, min(FILES_KEPT, soft // 4)))


_LIBC = ctypes.CDLL(None)
_NO_LINGER = struct.pack("ii", 1, 0)


class Connections:
    """Watches the connections of a ROUTER socket. Create it before the socket is bound.

    `on_failure` is called with the kind of each failed handshake, unless ZAP has rejected the key.
    The kinds are `plain` (no encryption), `hub_key` (the peer expects another hub's key),
    `unfinished` and `protocol`. `on_sweep` is called every second.
    """

    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        loop: asyncio.AbstractEventLoop,
        bounds: ConnectionBounds,
        on_failure: Callable[[str], None],
        on_sweep: Callable[[], None],
        *,
        encrypted: bool,
    ) -> None:
        self.by_peer: dict[Peer, Connection] = {}
        self.channel: Channel | None = None
        """The channel that reads the socket. Until it is set, no message is considered too long."""
        self._loop = loop
        self._bounds = bounds
        self._on_failure = on_failure
        self._on_sweep = on_sweep
        self._frame_bytes = FRAME_BYTES if encrypted else 0
        self._connections: dict[int, Connection] = {}
        self._routing_ids = RoutingIds(router)
        self._monitor = RouterMonitor(router, loop, self._on_event)
        self._arrivals = select.epoll()
        loop.add_reader(self._arrivals.fileno(), self._on_arrival)
        self._look_timer: asyncio.TimerHandle | None = None
        self._barrier = AddressBarrier(loop, bounds.failing)
        self._sweeps = self._denied = 0
        self._sweep_timer = loop.call_later(SWEEP_S, self._sweep)
        _watching.add(self)

    def close(self) -> None:
        """Stop watching. Call it before the socket is closed."""
        _watching.discard(self)
        self._sweep_timer.cancel()
        self._barrier.close()
        if self._look_timer is None:
            self._loop.remove_reader(self._arrivals.fileno())
        else:
            self._look_timer.cancel()
        self._arrivals.close()
        self._monitor.close()

    def close_in_child(self) -> None:
        """Close this process's sockets in a forked child.

        The child must not use any other method of this object.
        """
        descriptors = [each.descriptor for each in self._connections.values() if _is_same(each)]
        if self._barrier.listener is not None:
            descriptors.append(self._barrier.listener.descriptor)
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # -- messages --------------------------------------------------------------------------------------------

    def heard(self, peer: Peer, key: Key, channel: Channel, header_bytes: int, payload_bytes: int | None) -> bool:
        """Record the channel's current message; return whether its connection may stay open."""
        connection = self.by_peer.get(peer)
        if connection is None or connection.key != key:
            if (descriptor := channel.descriptor) < 0:
                return False  # the connection is unknown, so no limit could be enforced
            connection = self._find(peer, descriptor)
            if connection is None:
                return True  # the connection has already ended
        connection.heard = True
        connection.delivered_bytes += self._travelled(header_bytes, payload_bytes)
        if connection.key is None:
            self._shut(self._bounds.spoke(connection, key))
        if header_bytes > HEADER_BYTES_MAX:
            self._shut(self._bounds.said_too_much(connection, "header"))
        return not connection.shut

    def said_too_much(self, peer: Peer) -> None:
        """Close the connection of a peer that sends too many messages."""
        if (connection := self.by_peer.get(peer)) is not None:
            self._shut(self._bounds.said_too_much(connection, "messages"))

    def begins_enrolment(self, peer: Peer) -> bool:
        """Record an enrolment attempt; return whether it is the first one on this connection."""
        connection = self.by_peer.get(peer)
        if connection is None or connection.enrols:
            return False
        connection.enrols = True
        return True

    def said_without_end(self, descriptor: int) -> None:
        """Close a connection whose message has too many frames."""
        self._monitor.read()
        if (connection := self._connections.get(descriptor)) is not None:
            self._shut(self._bounds.said_too_much(connection, "frames"))

    def _find(self, peer: Peer, descriptor: int) -> Connection | None:
        """Return the connection on which a peer sent its first message, or `None` if it has ended."""
        if descriptor not in self._connections:
            self._monitor.read()
        connection = self._connections.get(descriptor)
        if connection is None:
            return None
        if self.by_peer.get(connection.peer) is connection:
            del self.by_peer[connection.peer]
        connection.peer = peer
        self.by_peer[peer] = connection
        return connection

    def sent(self, peer: Peer, header_bytes: int, payload_bytes: int | None, *, copied: bool) -> None:
        """Record a message that was sent to a peer, and whether libzmq has copied the payload."""
        if (connection := self.by_peer.get(peer)) is None:
            return
        connection.sent_bytes += self._travelled(header_bytes, payload_bytes)
        connection.copied_bytes += header_bytes + (payload_bytes if copied and payload_bytes is not None else 0)

    def _travelled(self, header_bytes: int, payload_bytes: int | None) -> int:
        """Return the number of bytes of a message on the wire.

        ZMTP sends flags and a length before each frame.
        """
        nbytes = header_bytes + self._frame_bytes
        nbytes += 2 if nbytes < 256 else 9
        if payload_bytes is None:
            return nbytes
        payload_bytes += self._frame_bytes
        return nbytes + payload_bytes + (2 if payload_bytes < 256 else 9)

    # -- closing connections --------------------------------------------------------------------------------

    def has_claimed(self, routing_id: bytes) -> bool:
        """Return whether a peer chose this routing id itself."""
        if self._routing_ids.has_given(routing_id):
            return False
        self._monitor.read()  # the connection may be newer than the last read events
        return not self._routing_ids.has_given(routing_id)

    def shut(self, keys: set[Key]) -> None:
        """Close the connections of these keys, and all connections without a message.

        The keys of the latter are not known yet, so they may belong to `keys`.
        """
        self._monitor.read()
        for connection in self._connections.values():
            if connection.key is None or connection.key in keys:
                _shut(connection)

    def shut_one(self, descriptor: int) -> None:
        """Close one connection."""
        self._monitor.read()
        if (connection := self._connections.get(descriptor)) is not None:
            _shut(connection)

    def _shut(self, to_close: ToClose | None) -> None:
        if to_close is not None:
            connection, reason = to_close
            _shut(connection, at_once=reason in ("frames", "header", "messages", "unread"))

    def _sweep(self) -> None:
        """Check all connections, and close those that have been idle for too long."""
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)
        self._on_sweep()
        # epoll does not report bytes that libzmq has already read, so check all connections for bursts.
        self._weigh([*self._connections])
        if self._bounds.unread.connections and self._look_timer is None:
            self._on_arrival()
        now_s = self._loop.time()
        for to_close in self._bounds.silent(now_s):
            self._shut(to_close)
        self._sweeps += 1
        if self._sweeps % IDLE_SWEEPS == 0:
            for to_close in self._bounds.idle(now_s):
                self._shut(to_close)
            self._give_memory_back()

    def _give_memory_back(self) -> None:
        """Return freed memory to the system after a flood.

        Otherwise the allocator would keep most of it.
        """
        denied, self._denied = self._denied, self._bounds.denied.total()
        if denied != self._denied and (trim := getattr(_LIBC, "malloc_trim", None)) is not None:
            trim(0)

    def _on_event(self, event: int, value: int) -> None:
        match event:
            case zmq.EVENT_LISTENING:
                self._barrier.listener = ListenerFilter(value)
            case zmq.EVENT_ACCEPTED:
                self._on_accepted(value)
            case zmq.EVENT_DISCONNECTED:
                self._on_disconnected(value)
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._on_failure("unfinished")
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._on_failure(_FAILURES.get(value, "protocol"))

    def _on_accepted(self, descriptor: int) -> None:
        self._routing_ids.count += 1
        self._on_disconnected(descriptor)  # in case libzmq did not report it
        now_s, far_end = self._loop.time(), _far_end(descriptor)
        address = str(far_end[0]) if isinstance(far_end, tuple) else ""
        connection = Connection(descriptor, address, now_s, far_end)
        self._connections[descriptor] = connection
        for to_close in self._bounds.accepted(connection, now_s):
            self._shut(to_close)
        self._barrier.update()
        if isinstance(far_end, tuple) and not connection.shut:
            with contextlib.suppress(OSError):  # the connection is already closed
                self._arrivals.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def _on_disconnected(self, descriptor: int) -> None:
        if (connection := self._connections.pop(descriptor, None)) is None:
            return
        if self.by_peer.get(connection.peer) is connection:
            del self.by_peer[connection.peer]
        self._bounds.closed(connection, self._loop.time())

    # -- unread bytes ----------------------------------------------------------------------------------------

    def _on_arrival(self) -> None:
        """Schedule a check of the connections that received bytes."""
        self._loop.remove_reader(self._arrivals.fileno())
        self._look_timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Check the connections that have received bytes or that have unread bytes."""
        arrived: list[tuple[int, int]] = []
        try:
            self._monitor.read(EVENTS_AT_A_TIME)
            arrived = self._arrivals.poll(0, max(1, len(self._connections)))
            self._weigh([descriptor for descriptor, _ in arrived])
        finally:  # an error must not end the checks
            if arrived or self._bounds.unread.connections:
                self._look_timer = self._loop.call_later(LOOK_S, self._look)
            else:
                self._look_timer = None
                self._loop.add_reader(self._arrivals.fileno(), self._on_arrival)

    @property
    def _emptied(self) -> int:
        return 0 if self.channel is None else self.channel.emptied

    def _weigh(self, arrived: list[int]) -> None:
        now_s = self._loop.time()
        found = [self._connections.get(descriptor) for descriptor in arrived]
        active = [each for each in found if each is not None and needs_look(each)]
        for connection in {
            id(each): each for each in (*active, *self._bounds.unread.connections.values())
        }.values():
            if (counts := _tcp_counts(connection)) is not None:
                taken_bytes = counts[0] - _queued_bytes(connection)
                self._shut(
                    self._bounds.weigh(connection, *counts, now_s, taken_bytes=taken_bytes, emptied=self._emptied)
                )
        if self.channel is not None and self._bounds.unread.connections:
            self.channel.read_soon()  # a message that is not delivered by the next check is incomplete


_watching: WeakSet[Connections] = WeakSet()


def _close_in_child() -> None:
    for connections in _watching:
        connections.close_in_child()
    _watching.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def _socket_of(descriptor: int) -> Any:
    """Yield a socket object for a descriptor of libzmq. The descriptor is not closed."""
    borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _far_end(descriptor: int) -> Any:
    """Return the remote address, or `None` if the connection has ended."""
    try:
        with _socket_of(descriptor) as borrowed:
            return borrowed.getpeername()
    except OSError:
        return None


def _is_same(connection: Connection) -> bool:
    """Return whether a descriptor still belongs to its connection.

    libzmq may have closed the descriptor in the meantime.
    """
    return connection.far_end is not None and _far_end(connection.descriptor) == connection.far_end


def _tcp_counts(connection: Connection) -> tuple[int, int] | None:
    """Return the numbers of received bytes and of acknowledged sent bytes of a connection."""
    info, length = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint32(_TCP_INFO_BYTES)
    told = _LIBC.getsockopt(
        connection.descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length)
    )  # creating a socket object would need another system call
    if told != 0 or length.value < _TCP_INFO_BYTES:
        return None
    acknowledged_bytes, received_bytes = _ACKED_AND_RECEIVED.unpack_from(info, _ACKED_AT)
    return received_bytes, acknowledged_bytes


def _queued_bytes(connection: Connection) -> int:
    """Return the number of received bytes that libzmq has not read from the kernel yet."""
    try:
        queued = fcntl.ioctl(connection.descriptor, termios.FIONREAD, bytes(4))
    except OSError:
        return 0  # libzmq has just closed it
    return int.from_bytes(queued, sys.byteorder)


def _shut(connection: Connection, *, at_once: bool = False) -> None:
    """Shut down a connection. With `at_once`, drop outgoing data, for a peer that does not read it."""
    connection.shut = True
    if _is_same(connection):
        with contextlib.suppress(OSError), _socket_of(connection.descriptor) as borrowed:
            if at_once:
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            borrowed.shutdown(socket.SHUT_RDWR)
