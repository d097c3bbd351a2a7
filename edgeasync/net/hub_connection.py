"""A device's connection to its hub: a DEALER socket, and the last result for each address."""

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
"""Maximum number of messages that are queued for a busy agent.

A hub sends at most 32 pieces before it waits for credit.
"""

LINGER_MS = 300
"""How long a closing agent tries to send its last message."""

ENCRYPTION_BYTES = 64
"""Upper bound for the number of bytes that encryption adds to a frame."""


class HubConnection:
    """Connects a device to its hub, at one address at a time.

    All methods and callbacks run on the agent's event loop. The network may be `shared` with a hub
    in the same process.
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
        """The address that is currently used."""
        self.bytes_up = self.bytes_down = 0
        """Numbers of bytes of all messages sent to the hub and received from it."""
        self.findings: dict[str, Finding] = {}
        """Maps each address that has not answered since the last join to the result of its last
        connection.
        """
        self._pair = credentials.pair
        self._frame_bytes_max = frame_bytes_max
        self._on_message = on_message
        self._on_connected, self._on_disconnected = on_connected, on_disconnected
        self._shared = shared
        self._channel: Channel | None = None
        self._monitor: SocketMonitor | None = None
        self._explaining: asyncio.Task[None] | None = None
        self._early: list[tuple[bytes, Buffer | None]] = []
        """Messages sent before the connection was established. A second socket sends them again."""

    def begin(self) -> None:
        """Allow calls of `connect` until `end` is called. The sockets use the running loop."""
        self._loop = asyncio.get_running_loop()
        self.network = ZmqNetwork() if self._shared is None else self._shared

    def end(self) -> None:
        """Close the network. A goodbye that was sent just before is still delivered."""
        if self._shared is None:
            self.network.close()

    def connect(self, number: int) -> None:
        """Connect a new socket to address `number`; raises `AddressError`. Call `close` before.

        A name is resolved to IPv4 addresses or, if it has none, to IPv6 addresses.
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
        monitor = SocketMonitor(socket, self._loop, self._on_connected, self._lost, open_another)
        try:
            connect(socket, self.address)
        except AddressError:
            monitor.close()
            socket.close(0)
            raise
        self._monitor = monitor
        self._channel = Channel(socket, self._loop, self.receive)

    def _lost(self) -> None:
        """Process the messages that arrived before the connection was lost, then report the loss.

        Otherwise, the hub would have to send the pieces of a transfer again.
        """
        channel = self._channel
        if channel is not None:
            channel.drain(QUEUED_MESSAGES_MAX)
        if channel is self._channel:  # otherwise, a message has already closed the connection
            self._on_disconnected()

    def has_connected(self) -> bool:
        """Return whether the connection is established, so that earlier messages have left."""
        return self.finding == "spoken"

    @property
    def finding(self) -> Finding | None:
        """How far the current connection got, or `None` if there is no connection."""
        return None if self._monitor is None else self._monitor.finding

    def send(self, header: bytes, payload: Buffer | None) -> None:
        """Send a message without waiting. Drop it if there is no connection."""
        if self._channel is not None:
            log_frame("out", b"", header, payload)
            self.bytes_up += len(header) if payload is None else len(header) + len(payload)
            if self.finding == "nothing":
                self._early.append((header, payload))
            self._channel.send(b"", header, payload)

    def receive(self, peer: bytes, header: bytes, payload: Buffer | None) -> None:
        """Count a message and pass it on; called by the channel."""
        log_frame("in", peer, header, payload)
        self.bytes_down += len(header) if payload is None else len(header) + len(payload)
        self._on_message(header, payload)

    def close(self, *, goodbye: bool, answered: bool) -> None:
        """Close the socket if it is open.

        Unless the hub has `answered`, record how far the connection got.
        """
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
        """Call `then` with the report.

        Its `detail` then says since when, and why, no hub is reachable.
        """
        assert waiting.since_s is not None
        since = written(time.time() - time.monotonic() + waiting.since_s)
        findings = {address: (finding, "") for address, finding in self.findings.items()}
        # There is no finding for a hub that answered before but is silent now.
        findings[self.address] = self.findings.get(self.address, "spoken"), waiting.detail

        async def find_reasons() -> None:
            reasons = await asyncio.gather(*[explain(address, *found) for address, found in findings.items()])
            told = [f"{address}: {reason}" for address, reason in zip(findings, reasons, strict=True)]
            then(msgspec.structs.replace(waiting, detail=f"since {since}: {'; '.join(told)}"))

        self._explaining = self._loop.create_task(find_reasons())

    def cancel(self) -> None:
        """Cancel a pending call of `explain`."""
        if self._explaining is not None:
            self._explaining.cancel()


def frame_bytes_max(parameters_max: int, graph_bytes_max: int) -> int:
    """Return the maximum length of a frame that a hub may send.

    The frame may be a welcome's header, a payload or a piece. Longer payloads are sent in pieces.
    """
    payload_bytes = max(compressed_bytes_max(4 * parameters_max + 64), graph_bytes_max)
    return max(wire.HEADER_BYTES_MAX, min(payload_bytes, PIECE_BYTES_MAX)) + ENCRYPTION_BYTES
