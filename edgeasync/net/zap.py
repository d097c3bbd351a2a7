"""ZAP (RFC 27): authorize the key of every new connection on behalf of libzmq.

pyzmq's authenticators need a thread or `zmq.asyncio` sockets, and do not report their own failures.
This handler runs on the hub's event loop. If the decision raises an exception, the handler logs it
and rejects the key. While the handler is not running, no connection is accepted.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

from edgeasync.durable.allow_list import Key
from edgeasync.errors import AddressError
from edgeasync.net.curve import DOMAIN

LOG = logging.getLogger("edgeasync.keys")

ENDPOINT = "inproc://zeromq.zap.01"

_ALLOWED, _DENIED, _FAILED = b"200", b"400", b"500"

Decide = Callable[[Key, str], bool | None]
"""Decides whether a key may connect from an address. `None` rejects the key only for now."""


class ZapHandler:
    """Answers libzmq's authorization requests for all sockets of a context.

    Create it before the first socket is bound. When a key is admitted, libzmq attaches the key in
    hexadecimal to every frame of its connection as `User-Id`.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", loop: asyncio.AbstractEventLoop, decide: Decide
    ) -> None:
        self._decide = decide
        self._loop = loop
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise AddressError(
                "another hub with keys already uses this ZeroMQ context; use a separate context for each hub"
            ) from error
        self._fd = self._socket.FD
        loop.add_reader(self._fd, self._read)
        loop.call_soon(self._read)  # the edge-triggered descriptor may already have fired

    def close(self) -> None:
        """Stop answering. No new connections are admitted from then on."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(0)

    def _read(self) -> None:
        """Answer all pending requests, because the descriptor is edge-triggered."""
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(frames)

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Answer a request. Requests without an envelope, which libzmq never sends, are ignored."""
        if len(frames) < 4:
            return
        peer, empty, version, request, *rest = frames
        status, user_id = self._judge(version, rest)
        reply = [peer, empty, b"1.0", request, status, b"", user_id, b""]
        self._socket.send_multipart(reply, zmq.NOBLOCK)

    def _judge(self, version: bytes, rest: Sequence[bytes]) -> tuple[bytes, bytes]:
        try:
            domain, address, _, mechanism, key = rest
            if (version, domain, mechanism, len(key)) != (b"1.0", DOMAIN, b"CURVE", 32):
                return _DENIED, b""
            allowed = self._decide(key, address.decode("ascii", "replace"))
        except Exception:
            LOG.exception("rejected a key, because the handler failed")
            return _FAILED, b""
        if allowed is True:
            return _ALLOWED, key.hex().encode()
        # With ZAP's code 300, libzmq would leave the connection open.
        return _FAILED if allowed is None else _DENIED, b""
