"""Track the state of a socket's connection. libzmq only reports it to a monitor."""

import asyncio
from collections.abc import Callable
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

Finding = Literal[
    "nothing",
    "unresolved",
    "no way",
    "no answer",
    "refused",
    "taken",
    "foreign",
    "mechanism",
    "denied",
    "put off",
    "spoken",
]
"""How far a connection attempt got. `reach.explain` describes each value."""

EVENTS = (
    zmq.EVENT_CONNECT_DELAYED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


DENIED = 400
"""ZAP's status code for a rejected key. Other codes indicate temporary problems of the hub."""


class SocketMonitor:
    """Calls `on_connected` and `on_disconnected` on the loop when the connection state changes.

    It calls `on_unresolved` once if the name has no address of the socket's family. `finding`
    describes how far the connection got.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        loop: asyncio.AbstractEventLoop,
        on_connected: Callable[[], None],
        on_disconnected: Callable[[], None],
        on_unresolved: Callable[[], None] = lambda: None,
    ) -> None:
        self.finding: Finding = "nothing"
        self._socket = socket
        self._loop = loop
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._on_unresolved = on_unresolved
        self._events: zmq.Socket[bytes] | None = socket.get_monitor_socket(EVENTS)
        self._fd = self._events.FD
        loop.add_reader(self._fd, self._read)
        loop.call_soon(self._read)  # the edge-triggered descriptor may already have fired

    def close(self) -> None:
        """Stop monitoring. Call it before the socket is closed."""
        if self._events is not None:
            self._loop.remove_reader(self._fd)
            self._socket.disable_monitor()
            self._events.close(0)
            self._events = None

    def _read(self) -> None:
        """Read all events, because the descriptor is edge-triggered. Then report each change once."""
        connected, broken, before = False, False, self.finding
        while self._events is not None:
            try:
                message = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            self.finding = _find(message["event"], message["value"], self.finding)
            connected = connected or message["event"] == zmq.EVENT_CONNECTED
            broken = broken or message["event"] == zmq.EVENT_DISCONNECTED
        if connected:
            self._on_connected()
        if broken:
            self._on_disconnected()
        if self.finding == "unresolved" != before:
            self._on_unresolved()


def _find(event: int, value: int, before: Finding) -> Finding:
    """Return how far a connection got after an event.

    Events do not contain the error, so it is derived from the order of the events.
    """
    match event:
        case zmq.EVENT_CONNECT_DELAYED:  # the first attempt, or an attempt after a refused one
            return before if before == "refused" else "no answer"
        case zmq.EVENT_CLOSED:
            return "refused" if before in ("no answer", "refused") else "no way"
        case zmq.EVENT_CONNECT_RETRIED:  # without an earlier event, the name did not resolve
            return "unresolved" if before == "nothing" else before
        case zmq.EVENT_CONNECTED:
            return "taken"
        case zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "spoken"
        case zmq.EVENT_DISCONNECTED:
            return before if before in ("spoken", "mechanism", "denied", "put off") else "foreign"
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "denied" if value == DENIED else "put off"
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "mechanism"
        case _:  # the handshake has failed
            return "foreign"
