"""The sockets of a peer: one that the others write to, under their keys, and one to write to each of them.

A message goes from the writer's DEALER to the reader's ROUTER, and nothing comes back that way. All connections
are by CURVE. The reader knows the writer by its key, which must be in the list, and so does the writer the reader.
"""

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from edgeasync.core.engine.message_bounds import MessageBounds
from edgeasync.core.engine.peer_engine import HEADER_BYTES_MAX
from edgeasync.core.hub.settings import Limits
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.durable.allow_list import Key
from edgeasync.durable.keys import KeyPair, fingerprint
from edgeasync.durable.peers_file import PeerEntry, Peers, read_peers
from edgeasync.errors import AddressError, ConfigError
from edgeasync.host.file_watch import FileWatch
from edgeasync.net import routing_ids
from edgeasync.net.address import host_of, is_ipv6
from edgeasync.net.channel import Channel
from edgeasync.net.connection_bounds import ConnectionBounds
from edgeasync.net.connections import Connections, connections_that_fit
from edgeasync.net.curve import FRAME_BYTES, serve_keys
from edgeasync.net.dealer import connect, make_dealer
from edgeasync.net.network import ZmqNetwork, bind
from edgeasync.net.socket_monitor import SocketMonitor
from edgeasync.net.zap import ZapHandler
from edgeasync.protocol.messages import PEERS_MAX
from edgeasync.protocol.transfers import PIECE_BYTES_MIN
from edgeasync.protocol.wire import Buffer

LOG = logging.getLogger("edgeasync.peers")

QUEUED_MESSAGES_MAX = 64
"""Messages that may wait to be sent to one peer, or to be read; what finds no room is dropped, and repeated."""

HANDSHAKE_MS = 5000
CONNECTIONS_PER_KEY_MAX = 4
LOOK_S = 0.1
"""How often the file of peers and the connections are looked at."""

RETRY_S = 3.0
"""How long a connection may take to come about; then it is tried afresh, as the peer may let us in by now."""

OnMessage = Callable[[str, bytes, Buffer | None], None]


class PeerSockets:
    """Listens at `bind`, or where the own entry says, and connects to all other peers of a list. Used on one loop.

    `on_message` is called with the name of the peer whose key a message came under, `on_trouble` with a sentence.
    `on_peers` is called with the names of the list when it has changed, and when one of them can be written to.
    With a `file` the list is read again when that changes.
    """

    def __init__(
        self,
        own: PeerEntry,
        pair: KeyPair,
        peers: Peers,
        settings: PeerCoreSettings,
        network: ZmqNetwork,
        *,
        bind: str | None,
        file: Path | None,
        on_message: OnMessage,
        on_peers: Callable[[tuple[str, ...]], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._own = own
        self._pair = pair
        self._peers = peers
        self._bind = own_bind(own.address) if bind is None else bind
        self._lease_ms = int(1000 * settings.lease_s)
        self._context = network.context
        self._on_message = on_message
        self._on_peers = on_peers
        self._on_trouble = on_trouble
        self._names: dict[Key, str] = {}
        self._links: dict[str, _Link] = {}
        self._message_bounds = MessageBounds()
        limits = Limits(devices_max=PEERS_MAX, connections_per_key_max=CONNECTIONS_PER_KEY_MAX)
        self._bounds = ConnectionBounds(
            limits, lease_s=settings.lease_s, files_max=connections_that_fit(), by_address=True
        )
        self._frame_bytes_max = max(HEADER_BYTES_MAX, settings.piece_bytes, PIECE_BYTES_MIN) + FRAME_BYTES
        self._file = file

    def listen(self) -> None:
        """Listen on the running loop, and connect to the peers; raises `AddressError` if it cannot listen."""
        self._loop = asyncio.get_running_loop()
        routing_ids.seed()
        self._open(self._bind)
        self._watch = None if self._file is None else FileWatch(self._file)
        self._take(self._peers)
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _open(self, address: str) -> None:
        """Open the socket that the others write to; raises `AddressError`."""
        context, loop = self._context, self._loop
        router = context.socket(zmq.ROUTER)
        router.set(zmq.IPV6, is_ipv6(address))
        self._connections = Connections(router, loop, self._bounds, lambda _: None, lambda: None, encrypted=True)
        # libzmq asks a handler that is there when the socket is bound.
        self._zap = ZapHandler(context, loop, self._lets_in)
        serve_keys(router, self._pair)
        router.set(zmq.MAXMSGSIZE, self._frame_bytes_max)
        router.set(zmq.SNDHWM, 1)
        router.set(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
        router.set(zmq.LINGER, 0)
        router.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._set_heartbeat(router)
        try:
            self.address = bind(router, address)
        except AddressError:
            self._connections.close()
            self._zap.close()
            router.close(0)
            raise
        self._channel = Channel(router, loop, self._on_frames, on_endless=self._end_endless, authenticated=True)
        self._channel.large_payloads = True
        self._connections.channel = self._channel

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the others in the list."""
        return tuple(self._links)

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> None:
        """Send a message, unless there is no connection to this peer, or no room for more."""
        if (link := self._links.get(peer)) is not None:
            link.send(header, payload)

    def close(self, linger_ms: int) -> None:
        """Close all sockets; what was sent last may take `linger_ms` more."""
        self._timer.cancel()
        for link in self._links.values():
            link.close(linger_ms)
        self._zap.close()
        self._connections.close()
        self._channel.close(0)

    # -- who comes in ----------------------------------------------------------------------------------------

    def _lets_in(self, key: Key, address: str) -> bool | None:
        """Whether a key may come in; `None` if it has come too often."""
        if key not in self._names:
            LOG.info("not let in: key %s from %s is not in the list of peers", fingerprint(key), address)
            return False
        return self._bounds.allows_handshake(key, self._loop.time()) or None

    def _on_frames(self, routing_id: bytes, header: bytes, payload: Buffer | None) -> None:
        key = bytes.fromhex(self._channel.user_id)
        name = self._names.get(key)
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

    # -- the list --------------------------------------------------------------------------------------------

    def _take(self, peers: Peers) -> None:
        """Connect to new peers, and shut out those that are no longer in the list, or have another key."""
        others = {entry.name: entry for entry in peers.peer if entry.name != self._own.name}
        for name, link in list(self._links.items()):
            if others.get(name) != link.entry:
                link.close(0)
                del self._links[name]
        before, self._names = self._names, {entry.public: entry.name for entry in others.values()}
        if gone := {key for key, name in before.items() if self._names.get(key) != name}:
            self._connections.shut(gone)
        for name, entry in others.items():
            if name not in self._links:
                self._links[name] = _Link(entry, self)

    def _look(self) -> None:
        """Look at the file, and at the connections."""
        self._timer = self._loop.call_later(LOOK_S, self._look)
        now_s = self._loop.time()
        if sum(link.look(now_s) for link in self._links.values()):
            self._on_peers(self.peers)  # what was said to them before has not arrived
        if self._watch is not None and self._watch.has_changed():
            self._read_again(self._watch)

    def _read_again(self, watch: FileWatch) -> None:
        """Read the list again."""
        watch.note_read()
        try:
            peers = read_peers(watch.path)
            for entry in peers.peer:
                host_of(entry.address)
        except (ConfigError, AddressError) as error:
            self._on_trouble(f"{error}; the list before counts until then")
            return
        own = peers.of(self._own.name)
        if own is None or own.public != self._own.public:
            self._on_trouble(
                f"{watch.path}: no longer has this device, {self._own.name}, with its key; others leave it out"
            )
        self._take(peers)
        self._on_peers(self.peers)

    def connect(self, link: "_Link") -> None:
        """Give a link a fresh connection."""
        entry = link.entry
        pair = self._pair, entry.public
        socket = make_dealer(self._context, HEADER_BYTES_MAX, pair, ipv6=link.ipv6)
        socket.set(zmq.IMMEDIATE, 1)  # nothing is kept for a peer that is not there
        socket.set(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
        socket.set(zmq.RCVHWM, 1)
        self._set_heartbeat(socket)
        link.monitor = SocketMonitor(socket, self._loop, lambda: None, link.on_broken, link.on_unresolved)
        link.socket, link.begun_s, link.broken, link.spoken = socket, self._loop.time(), False, False
        try:
            connect(socket, entry.address)
        except AddressError as error:
            self._on_trouble(f"peer {entry.name}: {error}")

    def _set_heartbeat(self, socket: "zmq.Socket[bytes]") -> None:
        """Let a connection that is silent for a lease count as broken: the other end may have lost it unsaid."""
        socket.set(zmq.HEARTBEAT_IVL, max(1, self._lease_ms // 2))
        socket.set(zmq.HEARTBEAT_TIMEOUT, max(1, self._lease_ms))


class _Link:
    """The connection on which this device writes to one peer."""

    def __init__(self, entry: PeerEntry, sockets: PeerSockets) -> None:
        self.entry = entry
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: SocketMonitor | None = None
        self.begun_s = 0.0
        self.broken = self.spoken = False
        self.ipv6 = "[" in entry.address
        self._sockets = sockets
        sockets.connect(self)

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send a message if there is room for it."""
        assert self.socket is not None
        with contextlib.suppress(zmq.Again):
            if payload is None:
                self.socket.send(header, zmq.NOBLOCK)
            else:
                self.socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
                self.socket.send(payload, zmq.NOBLOCK, copy=False)

    def on_broken(self) -> None:
        """Note that the connection has broken."""
        self.broken = True

    def on_unresolved(self) -> None:
        """Try the other kind of addresses next."""
        self.ipv6, self.broken = not self.ipv6, True

    def look(self, now_s: float) -> bool:
        """Connect afresh if the connection has broken, or does not come about; return whether it just has."""
        assert self.monitor is not None
        before, self.spoken = self.spoken, self.monitor.finding == "spoken"
        late = self.monitor.finding != "spoken" and now_s > self.begun_s + RETRY_S
        if late or (self.broken and now_s > self.begun_s + LOOK_S):
            self.close(0)
            self._sockets.connect(self)
        return self.spoken and not before

    def close(self, linger_ms: int) -> None:
        """Close the socket."""
        assert self.socket is not None
        assert self.monitor is not None
        self.monitor.close()
        self.socket.close(linger_ms)


def own_bind(address: str) -> str:
    """Return where to listen for an address of the list: a name may be resolved by other machines alone."""
    host = host_of(address)
    if host is None:
        return address
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return f"tcp://*:{address.rpartition(':')[2]}"
    return address
