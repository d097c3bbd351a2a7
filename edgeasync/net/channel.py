"""A ZeroMQ socket on an asyncio loop: non-blocking calls, driven by the socket's file descriptor.

The descriptor is edge-triggered. It becomes readable once and does not signal again until all
messages have been read. So every wake-up reads until the socket is empty, in batches between which
the loop can run other callbacks. A send, even a failed one, also consumes the notification. So
every send outside a wake-up is followed by a read.
"""

import asyncio
from collections.abc import Callable
from typing import cast

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

# As plain integers, because pyzmq's enumerations are slow to combine.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class Channel:
    """Receives and sends whole messages (peer, header, payload) on a ROUTER or DEALER socket.

    On a DEALER, the peer is always `b""`. If a message has more than two frames, not counting the
    routing id, its frames are dropped. The message is then delivered with an empty header, which no
    valid message has. If it has more than `FRAMES_MAX` frames, `on_endless` is called before its
    last frame arrives. Until that frame arrives, libzmq delivers no other message, but the event
    loop keeps running.

    `emptied` counts how often the socket was read until it was empty.

    `user_id` is the key of the current message's sender in hexadecimal, and `descriptor` is the
    descriptor of its connection. libzmq attaches both to the frame, and the peer cannot change
    them.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
        on_message: OnMessage,
        on_idle: Callable[[], None] | None = None,
        *,
        on_endless: Callable[[], None] | None = None,
    ) -> None:
        self.emptied = 0
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
                send(header, _NOBLOCK)
            else:
                send(header, _MORE)
                send(payload, _NOBLOCK, copy=len(payload) < COPY_BELOW_BYTES)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        finally:
            if not (self._reading or self._scheduled) and (self._routed or self._is_readable):
                self.read_soon()  # a ROUTER often sends many messages in a row, and looks once after them
        return True

    def drain(self, messages_max: int) -> None:
        """Read the messages that have arrived, at least `messages_max` if there are so many.

        Call it when the connection was lost and the socket will be closed.
        """
        for _ in range(messages_max // BATCH + 1):
            if self._closed or not self._is_readable:
                return
            self._read(looks=True)

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
            self._read(looks=False)

    def _read_as_scheduled(self) -> None:
        self._scheduled = False
        self._read(looks=True)

    @property
    def _is_readable(self) -> bool:
        """Whether a message has arrived. If not, this takes a third as long as trying to receive one."""
        return bool(cast("int", self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _read(self, *, looks: bool) -> None:
        """Read a batch of messages; schedule another read if there may be more.

        Set `looks` if there may be no message. Then check whether there is one before receiving it.
        Always check before receiving the second message, because there is rarely one.
        """
        if self._closed:
            return
        self._reading = True
        emptied = False
        try:
            for number in range(BATCH):
                if self._long is not None:
                    message = self._drop_rest(self._long)
                elif (looks if number == 0 else number == 1) and not self._is_readable:
                    message = None
                else:
                    message = self._receive()
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
        receive, peer = self._socket.recv, b""
        try:
            if self._routed:
                peer = receive(_NOBLOCK)
            # A frame knows whether more follow. Asking the socket would take longer than making the frame.
            header = self._frame = receive(_NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if not header.more:
            return peer, header.bytes, None
        payload = receive(_NOBLOCK, copy=False)
        if not payload.more:
            return peer, header.bytes, payload.bytes if len(payload) < COPY_BELOW_BYTES else payload.buffer
        self._long, self._dropped = peer, 0
        return self._drop_rest(peer)

    def _drop_rest(self, peer: bytes) -> tuple[bytes, bytes, Buffer | None] | None:
        """Drop frames of a long message; return the message when it ends, and `None` before that."""
        for _ in range(FRAMES_AT_A_TIME):
            self._frame = frame = self._socket.recv(_NOBLOCK, copy=False)
            if not frame.more:
                self._long = None
                return peer, b"", None
            self._dropped += 1
            if self._dropped == FRAMES_MAX and self._on_endless is not None:
                self._on_endless()
        return None
