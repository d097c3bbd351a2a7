"""The connections of a hub's socket, as its monitor tells of them: which descriptor, and under which key.

A key that is revoked keeps its connection: libzmq asks once. So the hub shuts the descriptor down. libzmq may have
closed it a moment before, and the number may be another connection's by now: so it is shut only if the far end is
still the one that was accepted.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from edgeasync.durable.allow_list import Key
from edgeasync.runtime.routing_ids import first_of, is_given

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

_FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "plain",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "hub_key",
}


class _Connection(msgspec.Struct):
    far_end: Any
    accepted_s: float
    key: Key | None = None


class Connections:
    """Watches a ROUTER, from before it is bound.

    `on_failure` is called with the name of every handshake that fails, but for those that ZAP has denied.

    The names are `plain` (no encryption), `hub_key` (for a hub of another key), `unfinished` and `protocol`.
    """

    def __init__(
        self, router: "zmq.Socket[bytes]", loop: asyncio.AbstractEventLoop, on_failure: Callable[[str], None]
    ) -> None:
        self._router = router
        self._loop = loop
        self._on_failure = on_failure
        self._connections: dict[int, _Connection] = {}
        self._first, self._accepted = first_of(router), 0
        address = f"inproc://monitor-{id(router)}"
        router.monitor(address, _EVENTS)
        self._events: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        self._events.set(zmq.RCVHWM, 0)  # libzmq would wait for a hub that is slow to read
        self._events.set(zmq.LINGER, 0)
        self._events.connect(address)
        self._fd = self._events.FD
        loop.add_reader(self._fd, self._read)
        loop.call_soon(self._read)

    def close(self) -> None:
        """Stop; to be called before the socket is closed."""
        self._loop.remove_reader(self._fd)
        self._router.disable_monitor()
        self._events.close(0)

    def note(self, descriptor: int, key: Key) -> None:
        """Note under which key a connection speaks."""
        if descriptor not in self._connections:
            self._read()
        if (connection := self._connections.get(descriptor)) is not None:
            connection.key = key

    def has_claimed(self, routing_id: bytes) -> bool:
        """Whether a peer named this routing id itself."""
        if is_given(routing_id, self._first, self._accepted):
            return False
        self._read()  # the connection may be younger than what was read
        return not is_given(routing_id, self._first, self._accepted)

    def shut_silent(self, limit_s: float) -> None:
        """Shut the connections that have said nothing for so long since they were accepted."""
        self._read()
        since_s = self._loop.time() - limit_s
        for descriptor, connection in self._connections.items():
            if connection.key is None and connection.accepted_s < since_s:
                _shut(descriptor, connection.far_end)

    def shut(self, keys: set[Key]) -> None:
        """Shut the connections of these keys, and those that have not said anything yet: they may be theirs."""
        self._read()
        for descriptor, connection in self._connections.items():
            if connection.key is None or connection.key in keys:
                _shut(descriptor, connection.far_end)

    def shut_one(self, descriptor: int) -> None:
        """Shut one connection."""
        self._read()
        if (connection := self._connections.get(descriptor)) is not None:
            _shut(descriptor, connection.far_end)

    def _read(self) -> None:
        """Read all events, for the descriptor is edge-triggered."""
        while not self._events.closed:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            value = event["value"]
            match event["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._accepted += 1
                    self._connections[value] = _Connection(_far_end(value), self._loop.time())
                case zmq.EVENT_DISCONNECTED:
                    self._connections.pop(value, None)
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    self._on_failure("unfinished")
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._on_failure(_FAILURES.get(value, "protocol"))


@contextlib.contextmanager
def _socket_of(descriptor: int) -> Any:
    """Yield a socket object of its own for a connection; closing it leaves the connection open."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        yield copy


def _far_end(descriptor: int) -> Any:
    """Return who is at the far end, `None` if there is nobody any more."""
    try:
        with _socket_of(descriptor) as copy:
            return copy.getpeername()
    except OSError:
        return None


def _shut(descriptor: int, far_end: Any) -> None:
    with contextlib.suppress(OSError), _socket_of(descriptor) as copy:
        if far_end is not None and copy.getpeername() == far_end:
            copy.shutdown(socket.SHUT_RDWR)
