"""A ZeroMQ socket on an asyncio loop: non-blocking calls, driven by the socket's file descriptor.

The descriptor is edge-triggered. It becomes readable once and does not signal again until all
messages have been read. So every wake-up reads until the socket is empty, in batches between which
the loop can run other callbacks. A send, even a failed one, also consumes the notification. So
every send outside a wake-up is followed by a read.
"""

import asyncio
from collections.abc import Callable, Container

import zmq

from edgeasync.protocol.wire import Buffer

BATCH = 32
"""Number of messages to read before the event loop runs other callbacks."""

FRAMES_MAX = 16
"""Maximum number of frames of a message. Longer messages are reported as endless."""

FRAMES_AT_A_TIME = 1024
"""Number of frames of a long message to drop before the event loop runs other callbacks."""

COPY_BELOW_BYTES = 1 << 16
"""Frames smaller than this are copied.

Otherwise they would keep libzmq's shared receive buffer alive.
"""

OnMessage = Callable[[bytes, bytes, Buffer | None], None]

_MORE = zmq.SNDMORE | zmq.NOBLOCK


class Channel:
    """Receives and sends whole messages (peer, header, payload) on a ROUTER or DEALER socket.

    On a DEALER, the peer is always `b""`. If a message has more than two frames, not counting the
    routing id, its frames are dropped. The message is then delivered with an empty header, which no
    valid message has. If it has more than `FRAMES_MAX` frames, `on_endless` is called before its
    last frame arrives. Until that frame arrives, libzmq delivers no other message, but the event
    loop keeps running.

    `emptied` counts how often the socket was read until it was empty.

    If `authenticated`, `user_id` is the key of the current message's sender in hexadecimal, and
    `descriptor` is the descriptor of its connection. libzmq attaches both to the frame, and the
    peer cannot change them. If not `authenticated`, `descriptor` is only available for peers that
    are not `known`.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
        on_message: OnMessage,
        on_idle: Callable[[], None] | None = None,
        *,
        on_endless: Callable[[], None] | None = None,
        authenticated: bool = False,
        known: Container[bytes] | None = None,
    ) -> None:
        self.large_payloads = False
        self.emptied = 0
        self._authenticated = authenticated
        self._known = known
        self._frame: zmq.Frame | None = None
        self._socket = socket
        self._loop = loop
        self._on_message = on_message
        self._on_idle = on_idle
        self._on_endless = on_endless
        self._long: bytes | None = None
        """The peer whose long message is being dropped, or `None`."""
        self._dropped = 0
        self._routed = socket.getsockopt(zmq.TYPE) == zmq.ROUTER
        self._reading = self._scheduled = self._closed = False
        loop.add_reader(socket.FD, self._on_readable)
        self.read_soon()

    @property
    def user_id(self) -> str:
        """The key of the current message's sender, or empty if it has no key."""
        assert self._frame is not None
        try:
            return str(self._frame.get("User-Id"))
        except zmq.ZMQError:
            return ""

    @property
    def descriptor(self) -> int:
        """The descriptor of the current message's connection, which may already be closed.

        It is negative for a peer that uses ZeroMQ 3 or older, because libzmq does not report it for
        such peers.
        """
        assert self._frame is not None
        try:
            return int(self._frame.get(zmq.SRCFD))
        except zmq.ZMQError:
            return -1

    def send(self, peer: bytes, header: bytes, payload: Buffer | None = None) -> bool:
        """Send a message without blocking; return whether the socket accepted it.

        A payload of 64 KiB or more is not copied. It must not change while any object refers to it.
        """
        if self._closed:
            return False
        send = self._socket.send
        try:
            if self._routed:
                send(peer, _MORE)
            if payload is None:
                send(header, zmq.NOBLOCK)
            else:
                send(header, _MORE)
                send(payload, zmq.NOBLOCK, copy=len(payload) < COPY_BELOW_BYTES)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        finally:
            if not self._reading:
                self.read_soon()
        return True

    def close(self, linger_ms: int) -> None:
        """Stop reading and close the socket.

        It continues to send its messages for up to `linger_ms`.
        """
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(linger_ms)

    def read_soon(self) -> None:
        """Schedule a read in the next iteration of the loop, even without a notification."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read_as_scheduled)

    def _on_readable(self) -> None:
        if not self._scheduled:  # otherwise two batches would be read, and each would schedule the next one
            self._read()

    def _read_as_scheduled(self) -> None:
        self._scheduled = False
        self._read()

    def _read(self) -> None:
        """Read a batch of messages; schedule another read if there may be more."""
        if self._closed:
            return
        self._reading = True
        emptied = False
        try:
            for _ in range(BATCH):
                message = self._receive() if self._long is None else self._drop_rest(self._long)
                if message is None:
                    emptied = self._long is None
                    self.emptied += emptied
                    break
                self._on_message(*message)
                if self._socket.closed:  # closed by the callback
                    return
        finally:
            self._reading = False
            if not emptied:  # also after an error, because the descriptor would stay silent
                self.read_soon()
        if self._on_idle is not None:
            self._on_idle()

    def _receive(self) -> tuple[bytes, bytes, Buffer | None] | None:
        receive, more = self._socket.recv, self._socket.getsockopt
        try:
            first = receive(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if self._authenticated or (self._known is not None and first not in self._known):
            self._frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            peer, header = first, self._frame.bytes
        else:
            peer, header = (first, receive(zmq.NOBLOCK)) if self._routed else (b"", first)
        if not more(zmq.RCVMORE):
            return peer, header, None
        payload: Buffer
        if self.large_payloads:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            payload = frame.bytes if len(frame.buffer) < COPY_BELOW_BYTES else frame.buffer
        else:
            payload = receive(zmq.NOBLOCK)
        if not more(zmq.RCVMORE):
            return peer, header, payload
        self._long, self._dropped = peer, 0
        return self._drop_rest(peer)

    def _drop_rest(self, peer: bytes) -> tuple[bytes, bytes, Buffer | None] | None:
        """Drop frames of a long message; return the message when it ends, and `None` before that."""
        for _ in range(FRAMES_AT_A_TIME):
            self._frame = frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            if not frame.more:
                self._long = None
                return peer, b"", None
            self._dropped += 1
            if self._dropped == FRAMES_MAX and self._on_endless is not None:
                self._on_endless()
        return None
