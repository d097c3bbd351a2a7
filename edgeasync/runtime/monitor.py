"""Learning at once that a TCP connection has broken: libzmq mends it silently, and what was under way is lost."""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message


class Monitor:
    """Calls `on_disconnected` on the loop whenever the socket's connection breaks, until it is closed."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", loop: asyncio.AbstractEventLoop, on_disconnected: Callable[[], None]
    ) -> None:
        self._socket = socket
        self._loop = loop
        self._on_disconnected = on_disconnected
        self._events: zmq.Socket[bytes] | None = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._fd = self._events.FD
        loop.add_reader(self._fd, self._read)
        loop.call_soon(self._read)  # the descriptor tells only once, and may have

    def close(self) -> None:
        """Stop; to be called before the socket is closed."""
        if self._events is not None:
            self._loop.remove_reader(self._fd)
            self._socket.disable_monitor()
            self._events.close(0)
            self._events = None

    def _read(self) -> None:
        """Read all events, for the descriptor is edge-triggered; then tell, once."""
        broken = False
        while self._events is not None:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            broken = broken or event["event"] == zmq.EVENT_DISCONNECTED
        if broken:
            self._on_disconnected()
