"""Read libzmq's events about connections to a ROUTER: accepted, ended, or failed in the handshake."""

import asyncio
import struct
from collections.abc import Callable

import zmq

EVENTS_AT_A_TIME = 128
"""Number of events to process before the event loop runs other callbacks."""

_EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

_EVENT = struct.Struct("=HI")


class RouterMonitor:
    """Calls `on_event` on the event loop with every event and its value.

    Create it before the ROUTER is bound.
    """

    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        loop: asyncio.AbstractEventLoop,
        on_event: Callable[[int, int], None],
    ) -> None:
        self._router = router
        self._loop = loop
        self._on_event = on_event
        address = f"inproc://monitor-{id(router)}"
        router.monitor(address, _EVENTS)
        self._events: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
        self._events.set(zmq.RCVHWM, 0)  # otherwise libzmq would block on a slow reader
        self._events.set(zmq.LINGER, 0)
        self._events.connect(address)
        self._fd = self._events.FD
        loop.add_reader(self._fd, self._read_some)
        loop.call_soon(self._read_some)

    def close(self) -> None:
        """Stop reading. Call it before the socket is closed."""
        self._loop.remove_reader(self._fd)
        self._router.disable_monitor()
        self._events.close(0)

    def read(self, count: int | None = None) -> bool:
        """Read all events, or at most `count` of them; return whether all events have been read."""
        while not self._events.closed and count != 0:
            try:
                event, _ = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._on_event(*_EVENT.unpack(event))
            count = None if count is None else count - 1
        return self._events.closed

    def _read_some(self) -> None:
        """Read a batch of events; schedule another batch if there may be more."""
        emptied = False
        try:
            emptied = self.read(EVENTS_AT_A_TIME)
        finally:  # also after an error, because the descriptor would stay silent
            if not emptied:
                self._loop.call_soon(self._read_some)
