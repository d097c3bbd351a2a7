"""The gate of a hub with keys: CURVE on its socket, who may come in, enrolment by token, whose each message is."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import zmq

from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import Peer
from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import HubKeys, IssuedToken
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Enrol, Enrolled, Refuse
from edgeasync.runtime.access import Access
from edgeasync.runtime.channel import Channel
from edgeasync.runtime.connections import Connections
from edgeasync.runtime.curve import serve_keys
from edgeasync.runtime.worker import Worker
from edgeasync.runtime.zap import ZapHandler

SILENT_S = 30.0
"""How long a connection may say nothing at all; every peer has something to say as soon as it is in."""

LOOK_S = 1.0

GOODBYE_S = 0.2
"""How long the connection of a revoked key stays, so that its device is told. Nothing that it says is heard."""


class Gate:
    """Made before the hub's socket is bound, closed before it is. Used on the hub's loop.

    Raises `StorageError` for a folder of keys that cannot be read, `AddressError` if the context has a gate.
    `on_revoked` is called with keys that count no more, `on_trouble` with a sentence about a list or a disk. With
    `knocking`, keys that are not known are noted, for a person to accept.
    """

    def __init__(
        self,
        keys: HubKeys,
        socket: "zmq.Socket[bytes]",
        loop: asyncio.AbstractEventLoop,
        *,
        on_revoked: Callable[[set[Key]], None],
        on_trouble: Callable[[str], None],
        knocking: bool = False,
    ) -> None:
        self._keys = keys
        self._loop = loop
        self._on_revoked = on_revoked
        self._on_trouble = on_trouble
        self._access = Access(keys, self._revoked, on_trouble, self._note_knock if knocking else None)
        # libzmq asks a handler that is there when the socket is bound.
        self._zap = ZapHandler(socket.context, loop, self._access.lets_in)
        serve_keys(socket, self._access.pair)
        self._connections = Connections(socket, loop, self._count)
        self._enrolling: set[Key] = set()
        self._leaving: set[Key] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._worker = Worker("keys", self._fail_from_thread)

    def open(self) -> None:
        """Watch the list from now on, and enrol devices."""
        self._worker.start()
        self._access.watch(self._loop)
        self._shut_silent()

    def close(self) -> None:
        """Let nobody in any more."""
        self._access.close()
        if self._timer is not None:
            self._timer.cancel()
        self._zap.close()
        self._connections.close()
        self._worker.abandon()

    def holds(self, key: Key) -> bool:
        """Whether a key is in the list and not revoked."""
        return self._access.holds(key)

    def denied(self) -> dict[str, int]:
        """Return how many were not let in, by the reason."""
        return dict(sorted(self._access.denied.items()))

    def sender(self, channel: Channel, peer: Peer, header: bytes, payload: wire.Buffer | None) -> Sender | None:
        """Return whose the message is that the channel hands on.

        `None` for one that is not the hub's to hear: a token's, which is answered here, or that of a key that
        counts no more, whose connection is shut.
        """
        user_id, descriptor = channel.user_id, channel.descriptor
        if self._connections.has_claimed(peer):
            self._refuse("routing_id", descriptor)
            return None
        sender = self._access.sender(user_id)
        if sender is not None:
            self._connections.note(descriptor, sender.key)
            return sender
        token = self._access.token(user_id)
        if token is None and bytes.fromhex(user_id) in self._leaving:
            self._count("revoked")
        elif token is None:
            self._refuse("revoked", descriptor)
        else:
            self._connections.note(descriptor, token.key)
            if not self._enrol(token, channel, peer, header, payload):
                self._refuse("token", descriptor)
        return None

    def _enrol(
        self, token: IssuedToken, channel: Channel, peer: Peer, header: bytes, payload: wire.Buffer | None
    ) -> bool:
        """Begin to enrol a device, in the background; return whether it said what it may, and not twice."""
        try:
            message = wire.decode(header)
        except ProtocolError:
            return False
        if not isinstance(message, Enrol) or payload is not None or token.key in self._enrolling:
            return False
        self._enrolling.add(token.key)
        answer = partial(self._enrolled, channel, peer, token)
        key = message.key

        def work() -> None:
            found: str | StorageError | None
            try:
                found = self._keys.use_token(token.key, key, time.time())
            except StorageError as error:
                found = error
            self._loop.call_soon_threadsafe(answer, found)

        self._worker.submit(work)
        return True

    def _enrolled(
        self, channel: Channel, peer: Peer, token: IssuedToken, found: str | StorageError | None
    ) -> None:
        """Answer a device whose key is in the list now, or could not be brought there."""
        self._enrolling.discard(token.key)
        self._access.read()
        if isinstance(found, StorageError):
            self._on_trouble(f"{token.name} could not enrol: {found}")
            channel.send(peer, wire.encode(Refuse("busy", "the hub's keys cannot be written; try again", 1.0)))
        elif found is None:
            self._count("token")
            channel.send(peer, wire.encode(Refuse("not_allowed", "this token does not let this key in")))
        else:
            channel.send(peer, wire.encode(Enrolled(found)))

    def _revoked(self, keys: set[Key]) -> None:
        """End what keys have here, of which the hub tells their devices; then shut their connections."""
        self._on_revoked(keys)
        self._leaving |= keys
        self._loop.call_later(GOODBYE_S, self._shut, keys)

    def _shut(self, keys: set[Key]) -> None:
        self._leaving -= keys
        self._connections.shut(keys)

    def _fail_from_thread(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._on_trouble, f"nobody can enrol any more: {error!r}")

    def _note_knock(self, key: Key, address: str) -> None:
        def work() -> None:
            try:
                self._keys.knock(key, address, time.time())
            except StorageError as error:
                self._loop.call_soon_threadsafe(self._on_trouble, f"a knock could not be noted: {error}")

        self._worker.submit(work)

    def _refuse(self, reason: str, descriptor: int) -> None:
        """Count a message that nobody is to hear, and shut its connection."""
        self._count(reason)
        self._connections.shut_one(descriptor)

    def _shut_silent(self) -> None:
        self._connections.shut_silent(SILENT_S)
        self._timer = self._loop.call_later(LOOK_S, self._shut_silent)

    def _count(self, reason: str) -> None:
        self._access.denied[reason] += 1
