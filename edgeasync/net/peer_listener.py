"""A peer's listening socket, to which other peers connect. They are authenticated by their keys."""

import asyncio
import logging
from collections.abc import Callable

import zmq

from edgeasync.core.engine.message_bounds import MessageBounds
from edgeasync.core.engine.peer_engine import HEADER_BYTES_MAX
from edgeasync.core.hub.settings import Limits
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import KeyPair, fingerprint
from edgeasync.errors import AddressError
from edgeasync.net import routing_ids
from edgeasync.net.address import is_ipv6
from edgeasync.net.channel import Channel
from edgeasync.net.connection_bounds import ConnectionBounds
from edgeasync.net.connections import Connections, connections_that_fit
from edgeasync.net.curve import FRAME_BYTES, serve_keys
from edgeasync.net.network import bind
from edgeasync.net.zap import ZapHandler
from edgeasync.protocol.messages import PEERS_MAX
from edgeasync.protocol.transfers import PIECE_BYTES_MIN
from edgeasync.protocol.wire import Buffer

LOG = logging.getLogger("edgeasync.peers")

QUEUED_MESSAGES_MAX = 64
"""Maximum number of messages in the send queue of a peer, and in the receive queue.

Further messages are dropped, and are sent again later.
"""

HANDSHAKE_MS = 5000
CONNECTIONS_PER_KEY_MAX = 4

OnMessage = Callable[[str, bytes, Buffer | None], None]


class PeerListener:
    """Receives messages from the peers in `names`, using the running loop.

    `on_message` is called with the sender's name. Raises `AddressError` if it cannot listen.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        pair: KeyPair,
        settings: PeerCoreSettings,
        on_message: OnMessage,
    ) -> None:
        self.names: dict[Key, str] = {}
        self._on_message = on_message
        self._loop = loop = asyncio.get_running_loop()
        self._message_bounds = MessageBounds()
        limits = Limits(devices_max=PEERS_MAX, connections_per_key_max=CONNECTIONS_PER_KEY_MAX)
        self._bounds = ConnectionBounds(
            limits, lease_s=settings.lease_s, files_max=connections_that_fit(), by_address=True
        )
        routing_ids.seed()
        router = context.socket(zmq.ROUTER)
        router.set(zmq.IPV6, is_ipv6(address))
        self._connections = Connections(router, loop, self._bounds, lambda _: None, lambda: None, encrypted=True)
        # The ZAP handler must exist before the socket is bound.
        self._zap = ZapHandler(context, loop, self._lets_in)
        serve_keys(router, pair)
        frame_bytes_max = max(HEADER_BYTES_MAX, settings.piece_bytes, PIECE_BYTES_MIN) + FRAME_BYTES
        router.set(zmq.MAXMSGSIZE, frame_bytes_max)
        router.set(zmq.SNDHWM, 1)
        router.set(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
        router.set(zmq.LINGER, 0)
        router.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        set_heartbeat(router, settings.lease_s)
        try:
            bind(router, address)
        except AddressError:
            self._connections.close()
            self._zap.close()
            router.close(0)
            raise
        self._channel = Channel(router, loop, self._on_frames, on_endless=self._end_endless)
        self._connections.channel = self._channel

    def listen_to(self, names: dict[Key, str]) -> None:
        """Admit the keys of the peers in `names`, and close the connections of all other keys."""
        gone = {key for key, name in self.names.items() if names.get(key) != name}
        self.names = names
        if gone:
            self._connections.shut(gone)

    def close(self) -> None:
        """Close the socket and its connections."""
        self._zap.close()
        self._connections.close()
        self._channel.close(0)

    def _lets_in(self, key: Key, address: str) -> bool | None:
        """Return whether a key may connect, or `None` if it connects too often."""
        if key not in self.names:
            LOG.info(
                "rejected a connection: key %s from %s is not in the list of peers", fingerprint(key), address
            )
            return False
        return self._bounds.allows_handshake(key, self._loop.time()) or None

    def _on_frames(self, routing_id: bytes, header: bytes, payload: Buffer | None) -> None:
        key = bytes.fromhex(self._channel.user_id)
        name = self.names.get(key)
        if name is None or self._connections.has_claimed(routing_id):
            self._connections.shut_one(self._channel.descriptor)
            return
        payload_bytes = None if payload is None else len(payload)
        if not self._connections.heard(routing_id, key, self._channel, len(header), payload_bytes):
            return
        if not self._message_bounds.allows(key, self._loop.time(), len(header)):
            self._connections.said_too_much(routing_id)
            return
        self._on_message(name, header, payload)

    def _end_endless(self) -> None:
        self._connections.said_without_end(self._channel.descriptor)


def set_heartbeat(socket: "zmq.Socket[bytes]", lease_s: float) -> None:
    """Set ZeroMQ's heartbeats so that a connection is closed if it is silent for a lease."""
    lease_ms = max(1, int(1000 * lease_s))
    socket.set(zmq.HEARTBEAT_IVL, max(1, lease_ms // 2))
    socket.set(zmq.HEARTBEAT_TIMEOUT, lease_ms)
