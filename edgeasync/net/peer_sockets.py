"""The sockets of a peer: one that receives from all other peers, and one per peer for sending.

A message is sent from the sender's DEALER to the receiver's ROUTER. No messages are sent in the
opposite direction on that connection. All connections use CURVE. Sender and receiver identify each
other by their keys, which must be in the list of peers.
"""

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from edgeasync.core.engine.peer_engine import HEADER_BYTES_MAX
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, Peers, read_peers
from edgeasync.errors import AddressError, ConfigError
from edgeasync.host.file_watch import FileWatch
from edgeasync.net.address import host_of
from edgeasync.net.dealer import connect, make_dealer
from edgeasync.net.network import ZmqNetwork
from edgeasync.net.peer_listener import QUEUED_MESSAGES_MAX, OnMessage, PeerListener, set_heartbeat
from edgeasync.net.socket_monitor import SocketMonitor
from edgeasync.protocol.wire import Buffer

LOOK_S = 0.1
"""Interval at which the peers file and the connections are checked."""

RETRY_S = 3.0
"""Timeout of a connection attempt.

A later attempt may succeed, because the other peer may have added this device in the meantime.
"""


class PeerSockets:
    """Listens for the peers of a list, and connects to each of them.

    It listens on `bind` or, by default, on the address in its own entry. `on_message` is called
    with the name of the sender, which is identified by its key. `on_trouble` is called with a
    message. `on_peers` is called with the names in the list when the list has changed and when a
    connection to a peer is established. If `file` is set, the list is read again when the file
    changes. Use it on one event loop. Raises `AddressError` if it cannot listen.
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
        self._own, self._pair = own, pair
        self._lease_s = settings.lease_s
        self._context = network.context
        self._on_peers, self._on_trouble = on_peers, on_trouble
        self._loop = asyncio.get_running_loop()
        address = own_bind(own.address) if bind is None else bind
        self._listener = PeerListener(self._context, address, pair, settings, on_message)
        self._links: dict[str, _Link] = {}
        self._watch = None if file is None else FileWatch(file)
        self._take(peers)
        self._timer = self._loop.call_later(LOOK_S, self._look)

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the other peers in the list."""
        return tuple(self._links)

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> None:
        """Send a message, or drop it if the peer is not connected or its queue is full."""
        if (link := self._links.get(peer)) is not None:
            link.send(header, payload)

    def close(self, linger_ms: int) -> None:
        """Close all sockets. They continue to send queued messages for up to `linger_ms`."""
        self._timer.cancel()
        for link in self._links.values():
            link.close(linger_ms)
        self._listener.close()

    def _take(self, peers: Peers) -> None:
        """Connect to new peers, and disconnect from those that were removed or changed."""
        others = {entry.name: entry for entry in peers.peer if entry.name != self._own.name}
        for name, link in list(self._links.items()):
            if others.get(name) != link.entry:
                link.close(0)
                del self._links[name]
        self._listener.listen_to({entry.public: entry.name for entry in others.values()})
        for name, entry in others.items():
            if name not in self._links:
                self._links[name] = _Link(entry, self._connect)

    def _look(self) -> None:
        """Check the file and the connections."""
        self._timer = self._loop.call_later(LOOK_S, self._look)
        if sum(link.look() for link in self._links.values()):
            self._on_peers(self.peers)  # earlier messages have not reached them
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
            self._on_trouble(f"{error}; the previous list stays in force until then")
            return
        own = peers.of(self._own.name)
        if own is None or own.public != self._own.public:
            self._on_trouble(
                f"{watch.path}: {self._own.name} with this device's key was removed, so other peers ignore it; "
                "add the entry again, or stop this peer"
            )
        self._take(peers)
        self._on_peers(self.peers)

    def _connect(self, link: "_Link") -> "zmq.Socket[bytes]":
        """Create a socket for a link, start to connect it, and return it."""
        socket = make_dealer(self._context, HEADER_BYTES_MAX, (self._pair, link.entry.public), ipv6=link.ipv6)
        socket.set(zmq.IMMEDIATE, 1)  # queue nothing for a peer that is not connected
        socket.set(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
        socket.set(zmq.RCVHWM, 1)
        set_heartbeat(socket, self._lease_s)
        link.monitor = SocketMonitor(socket, self._loop, lambda: None, link.on_broken, link.on_unresolved)
        try:
            connect(socket, link.entry.address)
        except AddressError as error:
            self._on_trouble(f"peer {link.entry.name}: {error}")
        return socket


class _Link:
    """The connection for sending to one peer. `connect` creates its socket and its monitor."""

    monitor: SocketMonitor

    def __init__(self, entry: PeerEntry, connect: Callable[["_Link"], "zmq.Socket[bytes]"]) -> None:
        self.entry = entry
        self.ipv6 = "[" in entry.address
        self._connect = connect
        self._begin()

    def _begin(self) -> None:
        self._begun_s, self._broken, self._spoken = time.monotonic(), False, False
        self._socket = self._connect(self)

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send a message, or drop it if the queue is full."""
        with contextlib.suppress(zmq.Again):
            if payload is None:
                self._socket.send(header, zmq.NOBLOCK)
            else:
                self._socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
                self._socket.send(payload, zmq.NOBLOCK, copy=False)

    def on_broken(self) -> None:
        """Record that the connection has broken."""
        self._broken = True

    def on_unresolved(self) -> None:
        """Use the other address family in the next attempt."""
        self.ipv6, self._broken = not self.ipv6, True

    def look(self) -> bool:
        """Reconnect if the connection has broken or timed out.

        Return whether the connection has been established since the last call.
        """
        before, self._spoken = self._spoken, self.monitor.finding == "spoken"
        age_s = time.monotonic() - self._begun_s
        if (not self._spoken and age_s > RETRY_S) or (self._broken and age_s > LOOK_S):
            self.close(0)
            self._begin()
        return self._spoken and not before

    def close(self, linger_ms: int) -> None:
        """Close the socket."""
        self.monitor.close()
        self._socket.close(linger_ms)


def own_bind(address: str) -> str:
    """Return the address on which a peer listens, given the address in its entry.

    A host name is replaced by `*`, because it may only be resolvable on other machines.
    """
    host = host_of(address)
    if host is None:
        return address
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return f"tcp://*:{address.rpartition(':')[2]}"
    return address
