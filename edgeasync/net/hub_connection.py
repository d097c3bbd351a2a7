"""The connection of a device to its hub: a DEALER socket, and what became of the last one to each address."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import zmq

from edgeasync.core.device.effects import DeviceReport
from edgeasync.errors import AddressError
from edgeasync.host.wall_clock import written
from edgeasync.net.channel import Channel
from edgeasync.net.credentials import Credentials
from edgeasync.net.curve import FRAME_BYTES
from edgeasync.net.dealer import connect, make_dealer
from edgeasync.net.frame_log import log_frame
from edgeasync.net.network import ZmqNetwork
from edgeasync.net.reach import explain
from edgeasync.net.socket_monitor import Finding, SocketMonitor
from edgeasync.protocol import wire
from edgeasync.protocol.codecs.compressed import compressed_bytes_max
from edgeasync.protocol.transfers import PIECE_BYTES_MAX
from edgeasync.protocol.wire import Buffer

QUEUED_MESSAGES_MAX = 64
"""Frames that may wait for a busy agent; a hub sends 32 pieces before it waits for credit."""

LINGER_MS = 300
"""How long a closing agent keeps sending its goodbye."""

ENCRYPTION_BYTES = 64
"""More than a frame grows by when it is encrypted."""


class HubConnection:
    """Connects a device to one of its hub's addresses at a time.

    All of it runs on the agent's loop, `on_message`, `on_connected` and
    `on_disconnected` as well. The network may be `shared` with a hub of this process.
    """

    def __init__(
        self,
        credentials: Credentials,
        frame_bytes_max: int,
        *,
        on_message: Callable[[bytes, Buffer | None], None],
        on_connected: Callable[[], None],
        on_disconnected: Callable[[], None],
        shared: ZmqNetwork | None = None,
    ) -> None:
        self.addresses = credentials.addresses
        self.address = self.addresses[0]
        """The hub that is spoken to."""
        self.bytes_up = self.bytes_down = 0
        """Bytes of all messages, to the hub and from it."""
        self.findings: dict[str, Finding] = {}
        """What became of the last connection to each address that did not answer, since a hub was joined."""
        self._pair = credentials.pair
        self._frame_bytes_max = frame_bytes_max
        self._on_message = on_message
        self._on_connected, self._on_disconnected = on_connected, on_disconnected
        self._shared = shared
        self._channel: Channel | None = None
        self._monitor: SocketMonitor | None = None
        self._explaining: asyncio.Task[None] | None = None
        self._early: list[tuple[bytes, Buffer | None]] = []
        """Messages from before the connection: a second socket sends them again."""

    def begin(self) -> None:
        """Make sockets on the running loop from now on, until `end`."""
        self._loop = asyncio.get_running_loop()
        self.network = ZmqNetwork() if self._shared is None else self._shared

    def end(self) -> None:
        """Close the network; a goodbye that was just sent still gets out."""
        if self._shared is None:
            self.network.close()

    def connect(self, number: int) -> None:
        """Connect a fresh socket to the address of this number; raises `AddressError`. Call `close` before.

        A name is looked up among addresses of IPv4 and, if it has none, among those of IPv6.
        """
        self.address = self.addresses[number]
        self._early.clear()
        self._open(ipv6="[" in self.address)

    def _open(self, *, ipv6: bool) -> None:
        def open_another() -> None:
            if not ipv6:
                self._shut(0)
                self._open(ipv6=True)
                assert self._channel is not None
                for header, payload in self._early:
                    self._channel.send(b"", header, payload)

        socket = make_dealer(self.network.context, self._frame_bytes_max + FRAME_BYTES, self._pair, ipv6=ipv6)
        socket.set(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
        monitor = SocketMonitor(socket, self._loop, self._on_connected, self._on_disconnected, open_another)
        try:
            connect(socket, self.address)
        except AddressError:
            monitor.close()
            socket.close(0)
            raise
        self._monitor = monitor
        self._channel = Channel(socket, self._loop, self.receive)
        self._channel.large_payloads = True

    def has_connected(self) -> bool:
        """Return whether the hub has answered on this connection, so that what was sent has left."""
        return self.finding == "spoken"

    @property
    def finding(self) -> Finding | None:
        """How far this connection has come; `None` without one."""
        return None if self._monitor is None else self._monitor.finding

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send a message without waiting; without a connection it is dropped."""
        if self._channel is not None:
            log_frame("out", b"", header, payload)
            self.bytes_up += len(header) if payload is None else len(header) + len(payload)
            if self.finding == "nothing":
                self._early.append((header, payload))
            self._channel.send(b"", header, payload)

    def receive(self, peer: bytes, header: bytes, payload: Buffer | None) -> None:
        """Count a message, and hand it on; a channel calls this."""
        log_frame("in", peer, header, payload)
        self.bytes_down += len(header) if payload is None else len(header) + len(payload)
        self._on_message(header, payload)

    def close(self, *, goodbye: bool, answered: bool) -> None:
        """Close the socket, if there is one; note what became of it unless the hub has `answered` over it."""
        if self._monitor is not None:
            self.findings.pop(self.address, None)
            if not answered:
                self.findings[self.address] = self._monitor.finding
        self._shut(LINGER_MS if goodbye else 0)

    def _shut(self, linger_ms: int) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._channel is not None:
            self._channel.close(linger_ms)
            self._channel = None

    def explain(self, waiting: DeviceReport, then: Callable[[DeviceReport], None]) -> None:
        """Call `then` with the report, once it is known since when no hub is reached, and why not, as of now."""
        assert waiting.since_s is not None
        since = written(time.time() - time.monotonic() + waiting.since_s)
        findings = {address: (finding, "") for address, finding in self.findings.items()}
        # A hub that answered before, and is not heard now, has left no finding.
        findings[self.address] = self.findings.get(self.address, "spoken"), waiting.detail

        async def find_reasons() -> None:
            reasons = await asyncio.gather(*[explain(address, *found) for address, found in findings.items()])
            told = [f"{address}: {reason}" for address, reason in zip(findings, reasons, strict=True)]
            then(msgspec.structs.replace(waiting, detail=f"since {since}: {'; '.join(told)}"))

        self._explaining = self._loop.create_task(find_reasons())

    def cancel(self) -> None:
        """Explain no more."""
        if self._explaining is not None:
            self._explaining.cancel()


def frame_bytes_max(parameters_max: int, graph_bytes_max: int) -> int:
    """Return the longest frame that a hub may send: a welcome's header, or a payload or a piece of it.

    A longer payload of a model or a graph comes in pieces.
    """
    payload_bytes = max(compressed_bytes_max(4 * parameters_max + 64), graph_bytes_max)
    return max(wire.HEADER_BYTES_MAX, min(payload_bytes, PIECE_BYTES_MAX)) + ENCRYPTION_BYTES
