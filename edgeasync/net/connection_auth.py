"""Authorize a hub's connections by keys: CURVE, enrolment by token, and each message's sender."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import zmq

from edgeasync.core.engine.message_bounds import HEADER_BYTES_MAX
from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import Peer
from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import HubKeys, IssuedToken
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.host.worker import Worker
from edgeasync.net.allow_list_reader import AllowListReader
from edgeasync.net.channel import Channel
from edgeasync.net.connection_bounds import ConnectionBounds
from edgeasync.net.connections import Connections
from edgeasync.net.curve import serve_keys
from edgeasync.net.zap import ZapHandler
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Enrol, Enrolled, Refuse

GOODBYE_S = 0.2
"""How long the connection of a revoked key stays open, so that its device can be notified.

Messages from the device are ignored during this time.
"""


class ConnectionAuth:
    """Authorizes connections and messages of a hub with keys. Use it on the hub's event loop.

    Create it before the hub's socket is bound, and close it before the socket. `on_revoked` is
    called with revoked keys, and `on_trouble` with a message about the list or the disk. If
    `knocking`, unknown keys that try to connect are recorded, so that a user can accept them.
    Raises `StorageError` if the folder of keys cannot be read, and `AddressError` if another hub
    with keys already uses the ZeroMQ context.
    """

    def __init__(
        self,
        keys: HubKeys,
        socket: "zmq.Socket[bytes]",
        loop: asyncio.AbstractEventLoop,
        connections: Connections,
        bounds: ConnectionBounds,
        *,
        on_revoked: Callable[[set[Key]], None],
        on_trouble: Callable[[str], None],
        knocking: bool = False,
    ) -> None:
        self._keys = keys
        self._loop = loop
        self._on_revoked = on_revoked
        self._on_trouble = on_trouble
        self._allow_list = AllowListReader(
            keys,
            self._revoked,
            on_trouble,
            on_knock=self._note_knock if knocking else None,
            on_expired=self._spend_expired,
        )
        # The ZAP handler must exist before the socket is bound.
        self._connections = connections
        self._bounds = bounds
        self._zap = ZapHandler(socket.context, loop, self._lets_in)
        serve_keys(socket, self._allow_list.pair)
        self._enrolling: set[Key] = set()
        self._leaving: set[Key] = set()
        self._worker = Worker("keys", self._fail_from_thread)

    def open(self) -> None:
        """Start to watch the list and to enrol devices."""
        self._worker.start()
        self._allow_list.watch(self._loop)

    def close(self) -> None:
        """Stop admitting connections and enrolling devices."""
        self._allow_list.close()
        self._zap.close()
        self._worker.abandon()

    def gives(self, key: Key, device_id: str) -> bool:
        """Return whether the list allows a key to use a device id."""
        return self._allow_list.gives(key, device_id)

    @property
    def device_names(self) -> frozenset[str]:
        """The names of the devices that the list admits."""
        return self._allow_list.device_names

    @property
    def denied(self) -> Counter[str]:
        """Number of rejections by reason."""
        return self._allow_list.denied

    def count(self, reason: str) -> None:
        """Count a rejection."""
        self._allow_list.denied[reason] += 1

    def _lets_in(self, key: Key, address: str) -> bool | None:
        """Return whether a key may connect, or `None` if it connects too often."""
        if not self._allow_list.lets_in(key, address):
            return False
        return self._bounds.allows_handshake(key, self._loop.time()) or None

    def sender(self, channel: Channel, peer: Peer, header: bytes, payload: wire.Buffer | None) -> Sender | None:
        """Return the sender of the channel's current message.

        Return `None` if the hub must not process the message. If the sender is authenticated by a
        token, the message is answered here. If the key is revoked, the connection is closed.
        """
        user_id = channel.user_id
        if self._connections.has_claimed(peer):
            self._refuse("routing_id", channel)
            return None
        sender = self._allow_list.sender(user_id)
        payload_bytes = None if payload is None else len(payload)
        if sender is not None:
            stays = self._connections.heard(peer, sender.key, channel, len(header), payload_bytes)
            return sender if stays else None
        token = self._allow_list.token(user_id)
        if token is None and bytes.fromhex(user_id) in self._leaving:
            self.count("revoked")
            return None
        if token is None:
            self._refuse("revoked", channel)
            return None
        stays = self._connections.heard(peer, token.key, channel, len(header), payload_bytes)
        if stays and not self._enrol(token, channel, peer, header, payload):
            self._refuse("token", channel)
        return None

    def _enrol(
        self, token: IssuedToken, channel: Channel, peer: Peer, header: bytes, payload: wire.Buffer | None
    ) -> bool:
        """Start to enrol a device in the background; return whether its message is valid.

        A connection may make only one attempt, because each attempt writes to the folder of keys.
        """
        try:
            message = wire.decode(header, HEADER_BYTES_MAX)
        except wire.UnsupportedVersionError as error:
            if stays := self._connections.begins_enrolment(peer):
                channel.send(peer, wire.encode(error.to_refuse()))
            return stays
        except ProtocolError:
            return False
        if not isinstance(message, Enrol) or payload is not None or token.key in self._enrolling:
            return False
        if not self._connections.begins_enrolment(peer):
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
        """Answer a device after an attempt to add its key to the list, whether or not it succeeded."""
        self._enrolling.discard(token.key)
        self._allow_list.read()
        if isinstance(found, StorageError):
            self._on_trouble(f"cannot enrol {token.name}: {found}")
            channel.send(peer, wire.encode(Refuse("busy", "the hub cannot write its keys; try again", 1.0)))
        elif found is None:
            self.count("token")
            channel.send(
                peer,
                wire.encode(
                    Refuse(
                        "not_allowed",
                        "this token does not authorize this key; create another one",
                    )
                ),
            )
        else:
            channel.send(peer, wire.encode(Enrolled(found)))

    def _revoked(self, keys: set[Key]) -> None:
        """End the sessions of revoked keys, which notifies their devices.

        Then close the connections.
        """
        self._on_revoked(keys)
        self._leaving |= keys
        self._loop.call_later(GOODBYE_S, self._shut, keys)

    def _shut(self, keys: set[Key]) -> None:
        self._leaving -= keys
        self._connections.shut(keys)

    def _fail_from_thread(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._on_trouble, f"cannot use the hub's keys: {error!r}")

    def _spend_expired(self) -> None:
        self._write(self._keys.spend_expired, "cannot record an expired token as used")

    def _note_knock(self, key: Key, address: str) -> None:
        self._write(partial(self._keys.knock, key, address), "cannot record a knock")

    def _write(self, write: Callable[[float], object], trouble: str) -> None:
        """Call `write` with the current time, in the background.

        If the folder of keys cannot be written, report `trouble`.
        """

        def work() -> None:
            try:
                write(time.time())
            except StorageError as error:
                self._loop.call_soon_threadsafe(self._on_trouble, f"{trouble}: {error}")

        self._worker.submit(work)

    def _refuse(self, reason: str, channel: Channel) -> None:
        """Count a rejected message, and close its connection."""
        self.count(reason)
        self._connections.shut_one(channel.descriptor)
