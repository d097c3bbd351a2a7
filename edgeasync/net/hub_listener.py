"""A hub's listening socket: a ROUTER for all devices, with limits and authorization by keys."""

import asyncio
from collections import Counter

import msgspec
import zmq

from edgeasync.core.engine.network import HubReceiver
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.settings import Limits
from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import HubKeys
from edgeasync.net import routing_ids
from edgeasync.net.address import is_ipv6
from edgeasync.net.channel import COPY_BELOW_BYTES, Channel
from edgeasync.net.connection_auth import ConnectionAuth
from edgeasync.net.connection_bounds import ConnectionBounds
from edgeasync.net.connections import Connections, connections_that_fit
from edgeasync.net.curve import FRAME_BYTES, refuse_old_peers
from edgeasync.net.frame_log import log_frame
from edgeasync.net.network import ZmqNetwork, bind
from edgeasync.protocol import wire

LINGER_MS = 500
"""How long a closing hub tries to send its last messages."""

HANDSHAKE_MS = 10_000
"""Timeout for ZeroMQ's handshake."""

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 30, 10, 3
"""TCP keepalive settings. They let the kernel detect that the remote end is gone."""

SOCKETS_MAX = 65_535
QUEUED_MESSAGES_MAX = 64


class ListenerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a listener.

    If `knocking`, unknown keys that try to connect are recorded, so that a user can accept them.
    """

    limits: Limits
    lease_s: float
    knocking: bool = False


class HubListener:
    """Listens on an address, using the running loop.

    - `keys` is the hub's folder of keys. Without it, all peers may connect, without encryption.
    - `shared` is the network that hub and agents in one process share to use `inproc:` addresses.
    """

    def __init__(
        self,
        address: str,
        settings: ListenerSettings,
        keys: HubKeys | None = None,
        shared: ZmqNetwork | None = None,
    ) -> None:
        self.address = address
        self._settings = settings
        self.keys = keys
        self._shared = shared
        self._bounds = ConnectionBounds(
            settings.limits,
            lease_s=settings.lease_s,
            files_max=connections_that_fit(),
            by_address=keys is not None,
        )
        self._auth: ConnectionAuth | None = None
        self._connections: Connections | None = None

    def listen(self, receiver: HubReceiver) -> None:
        """Listen, using the running loop.

        Raises `AddressError`, or `StorageError` for invalid keys.
        """
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._network = ZmqNetwork() if self._shared is None else self._shared
        if self._shared is None:
            self._network.context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        routing_ids.seed()
        socket = self._network.context.socket(zmq.ROUTER)
        try:
            self._bind(socket)
        except BaseException:
            self._close_auth()
            socket.close(0)
            self._close_network()
            raise
        self._channel = Channel(
            socket,
            self._loop,
            self._on_message,
            receiver.on_idle,
            on_endless=self._on_endless,
        )
        if self._connections is not None:
            self._connections.channel = self._channel

    def admit(self) -> None:
        """Start to watch the list of keys and to enrol devices."""
        if self._auth is not None:
            self._auth.open()

    def gives(self, key: Key, device_id: str) -> bool:
        """Return whether the list of keys allows a key to use a device id."""
        return self._auth is None or self._auth.gives(key, device_id)

    def send(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        """Send a message without waiting. Drop it if it cannot be sent now."""
        log_frame("out", peer, header, payload)
        if self._channel.send(peer, header, payload) and self._connections is not None:
            payload_bytes = None if payload is None else len(payload)
            # All connections share a snapshot. A status, and what libzmq copies, belong to one connection.
            own = isinstance(payload, bytes) or (payload_bytes or 0) < COPY_BELOW_BYTES
            self._connections.sent(peer, len(header), payload_bytes, copied=own)

    def address_of(self, peer: Peer) -> str:
        """Return the IP address of a connection, or "" if it is unknown."""
        connection = None if self._connections is None else self._connections.by_peer.get(peer)
        return "" if connection is None else connection.address

    @property
    def kept_off(self) -> Counter[str]:
        """Number of connections refused because of a limit, by reason."""
        return self._bounds.denied

    @property
    def device_names(self) -> frozenset[str]:
        """The names of devices that the list of keys admits; empty without keys."""
        return frozenset() if self._auth is None else self._auth.device_names

    @property
    def not_let_in(self) -> Counter[str]:
        """Number of rejected keys, by reason."""
        return Counter() if self._auth is None else self._auth.denied

    def close(self) -> None:
        """Reject new connections and close the socket.

        Queued messages are still sent for up to `LINGER_MS`.
        """
        self._close_auth()
        self._channel.close(LINGER_MS)
        self._close_network()

    # -- inside ----------------------------------------------------------------------------------------------

    def _bind(self, socket: "zmq.Socket[bytes]") -> None:
        socket.set(zmq.IPV6, is_ipv6(self.address))
        socket.set(zmq.ROUTER_MANDATORY, 1)
        frame_bytes_max = max(wire.HEADER_BYTES_MAX, int(self._settings.limits.piece_bytes))
        if not self.address.startswith("inproc:"):
            self._connections = Connections(
                socket,
                self._loop,
                self._bounds,
                self._on_failure,
                self._receiver.on_sweep,
                encrypted=self.keys is not None,
            )
        if self.keys is not None:
            assert self._connections is not None
            frame_bytes_max += FRAME_BYTES
            self._auth = ConnectionAuth(
                self.keys,
                socket,
                self._loop,
                self._connections,
                self._bounds,
                on_revoked=self._receiver.on_revoked,
                on_trouble=self._receiver.warn,
                knocking=self._settings.knocking,
            )
        elif self._shared is None:
            refuse_old_peers(socket)
        socket.set(zmq.MAXMSGSIZE, frame_bytes_max)
        socket.set(zmq.BACKLOG, 4096)
        socket.set(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
        socket.set(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EVERY_S)
        socket.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
        self.address = bind(socket, self.address)

    def _close_auth(self) -> None:
        if self._auth is not None:
            self._auth.close()
        if self._connections is not None:
            self._connections.close()

    def _close_network(self) -> None:
        if self._shared is None:
            self._network.close()

    def _on_message(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        log_frame("in", peer, header, payload)
        try:
            sender = self._sender(peer, header, payload)
            if sender is not None:
                self._receiver.receive(peer, header, payload, sender)
        except Exception as error:  # noqa: BLE001
            self._receiver.fail(error)

    def _sender(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> Sender | None:
        """Return the sender of a message, or `None` if it must not be processed."""
        connections = self._connections
        if connections is None:
            return ANYBODY
        sender: Sender | None = ANYBODY
        if self._auth is not None:
            sender = self._auth.sender(self._channel, peer, header, payload)
        else:
            payload_bytes = None if payload is None else len(payload)
            if not connections.heard(peer, b"", self._channel, len(header), payload_bytes):
                return None
        if sender is not None and not self._receiver.allows(sender.key or peer, len(header)):
            connections.said_too_much(peer)
            return None
        return sender

    def _on_endless(self) -> None:
        """Close the connection whose message the channel is reading."""
        if self._connections is not None:
            self._connections.said_without_end(self._channel.descriptor)

    def _on_failure(self, reason: str) -> None:
        """Count a failed handshake.

        Without keys, failed handshakes are not counted, because a handshake then authorizes nobody.
        """
        if self._auth is not None:
            self._auth.count(reason)
