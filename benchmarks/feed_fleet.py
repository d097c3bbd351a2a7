"""A real hub in its own process whose devices are simulated in its loop, and viewers of its feed."""

import asyncio
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import numpy as np

from benchmarks.hub_process import ADDRESS, Looked, allow_many_files, make_model, make_settings, run_probed
from edgeasync.config import FilePath
from edgeasync.core.engine.sender import ANYBODY
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.settings import Limits
from edgeasync.host.host_info import prepare_for_service
from edgeasync.net.channel import BATCH
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Assignment,
    DeviceProfile,
    Fetch,
    Hello,
    ModelVersion,
    Ping,
    Push,
    Welcome,
)
from edgeasync.runtime.hub import HubRuntime
from edgeasync.runtime.hub_feed import FeedSource, HubFeed
from edgeasync.runtime.hub_settings import HubSection
from edgeasync.runtime.page_settings import PageSection
from edgeasync.web.server import PageServer, plan_page

LENGTH = 256
"""Values of the model: 1 KB."""

HEARTBEAT_S = 5.0
PERIOD_S = 30.0
"""Time between two updates of a device."""

STEP_S = 0.004
"""How often the simulated devices send what is due."""

JOINING_MAX = 100
"""How many devices join before the loop handles other events."""


CONNECT_S = 0.05
"""Pause between two viewers that connect. The page limits how often an address may connect."""


class SimulatedDevices:
    """Devices that ping and push evenly, as far as the hub answers them."""

    def __init__(self, hub: "CrowdedHub", count: int) -> None:
        self._hub, self._count = hub, count
        self._random = Random(1)
        self._sessions: dict[Peer, bytes] = {}
        self._welcomed = asyncio.Event()
        self._pings: list[tuple[Peer, bytes]] = []
        self._bases: dict[Peer, ModelVersion] = {}
        self._sequences: dict[Peer, int] = {}
        self._payload = np.full(LENGTH, 1e-3, np.float32).tobytes()
        self._checksum = wire.checksum(self._payload)

    def hear(self, peer: Peer, header: bytes) -> None:
        """Process a message of the hub."""
        message = wire.decode(header)
        if isinstance(message, Welcome):
            self._sessions[peer] = message.session
            if len(self._sessions) == self._count:
                self._welcomed.set()
        elif isinstance(message, Assignment):
            self._bases[peer] = message.version

    async def join(self) -> None:
        """Let all devices join and fetch their first assignments."""
        peers = [number.to_bytes(5, "big") for number in range(self._count)]
        profile = DeviceProfile("simulated board", 4, 1 << 30, 1000, "edgeasync 0.1.0")
        for number, peer in enumerate(peers):
            self._say(peer, Hello(f"device-{number:05}", number.to_bytes(16, "big"), 1, profile=profile))
            if number % JOINING_MAX == 0:
                await asyncio.sleep(STEP_S)
        await self._welcomed.wait()
        for peer in peers:
            self._say(peer, Fetch(self._sessions[peer]))
            ping = Ping(self._sessions[peer], 1.0, 8, 0.02, temperature_c=50.0)
            self._pings.append((peer, wire.encode(ping)))

    async def run(self) -> None:
        """Ping and push until cancelled."""
        start_s, pinged, pushed = time.monotonic(), 0, 0
        while True:
            passed_s = time.monotonic() - start_s
            due_pings, due_pushes = (
                int(passed_s * self._count / HEARTBEAT_S),
                int(passed_s * self._count / PERIOD_S),
            )
            for turn in range(pinged, min(due_pings, pinged + BATCH)):
                peer, header = self._pings[turn % self._count]
                self._hub.receive(peer, header, None, ANYBODY)
            for turn in range(pushed, min(due_pushes, pushed + BATCH)):
                self._push(self._pings[turn * 7919 % self._count][0])
            pinged, pushed = min(due_pings, pinged + BATCH), min(due_pushes, pushed + BATCH)
            await asyncio.sleep(0.0 if pinged < due_pings else STEP_S)

    def _push(self, peer: Peer) -> None:
        base = self._bases.pop(peer, None)
        if base is None:
            return  # it waits for a version
        sequence = self._sequences[peer] = self._sequences.get(peer, 0) + 1
        loss = self._random.uniform(0.4, 0.6)
        values = (8, 256, loss, 0.25, 0.01, "identity", self._checksum, len(self._payload))
        self._say(peer, Push(self._sessions[peer], sequence, base, *values), self._payload)

    def _say(self, peer: Peer, message: Hello | Fetch | Push, payload: bytes | None = None) -> None:
        self._hub.receive(peer, wire.encode(message), payload, ANYBODY)


class TimedSource(FeedSource):
    """Measures the processor time of the feed's steps, which exclude sending."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.total_s = self.slowest_s = 0.0
        after = self.after

        def timed_after(delay_s: float, action: Callable[[], None]) -> None:
            after(delay_s, partial(self._time, action))

        self.after = timed_after

    def _time(self, action: Callable[[], None]) -> None:
        begun_s = time.thread_time()
        action()
        spent_s = time.thread_time() - begun_s
        self.total_s += spent_s
        self.slowest_s = max(self.slowest_s, spent_s)

    def look(self) -> tuple[float, float]:
        """Return the total and the longest time of a step since the last call, in seconds."""
        looked, self.total_s, self.slowest_s = (self.total_s, self.slowest_s), 0.0, 0.0
        return looked


class CrowdedHub(HubRuntime):
    """The real hub; what it sends goes to simulated devices."""

    devices: SimulatedDevices

    @cached_property
    def source(self) -> TimedSource:
        """The feed's shell."""
        return TimedSource(self._now_s, self.after, self.describe, None)

    @cached_property
    def feed(self) -> HubFeed:
        """The real feed, whose steps are timed."""
        return HubFeed(self._engine, self.source)

    def send(self, peer: Peer, header: bytes, payload: wire.Buffer | None) -> None:
        """Pass a message to the devices."""
        del payload
        self.devices.hear(peer, header)


@dataclass(frozen=True)
class LookedAtFeed:
    """Measurements of the hub and, since the last question, of the feed's steps."""

    hub: Looked
    feed_s: float
    slowest_step_ms: float


def serve_crowd(count: int, run: str, pipe: "Connection[Any, None]") -> None:
    """Run a hub with devices; send the port of its feed, then measurements on request."""
    allow_many_files()
    prepare_for_service()
    page, limits = PageSection(bind="127.0.0.1:*"), Limits(devices_max=count)
    settings = make_settings(
        HubSection(bind=ADDRESS, run=FilePath(run)), policy=Policy(), limits=limits, page=page
    )
    listening = asyncio.Event()

    def note(report: HubReport) -> None:
        if report.event == "listening":
            listening.set()

    hub = CrowdedHub(settings, make_model(LENGTH), on_report=note)
    hub.devices = SimulatedDevices(hub, count)

    async def work() -> None:
        serving = asyncio.create_task(hub.run())
        await listening.wait()
        await hub.devices.join()
        server = PageServer(hub, plan_page(settings))
        await server.open()
        pipe.send(int(server.urls["page"].rpartition(":")[2]))
        await asyncio.gather(serving, hub.devices.run())

    def describe(looked: Looked) -> LookedAtFeed:
        total_s, slowest_s = hub.source.look()
        looked = replace(looked, cpu_s=time.process_time(), live=hub.core.members.live_count)
        return LookedAtFeed(looked, total_s, 1e3 * slowest_s)

    run_probed(work, pipe, describe)


@dataclass(frozen=True)
class Received:
    """What viewers have received since they connected."""

    updates: int
    nbytes: int
    scrapes: int


def watch_feed(port: int, viewers: int, pipe: "Connection[Any, None]") -> None:
    """Read the feed over many connections, and scrape once a second, until killed.

    Report once every viewer has received something. Then answer questions with a `Received`.
    """
    selector = selectors.DefaultSelector()
    updates, nbytes, scrapes, scraped_s = [0] * viewers, 0, 0, 0.0
    for number in range(viewers):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(_request("/api/feed", port))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, number)
        time.sleep(CONNECT_S)
    selector.register(pipe.fileno(), selectors.EVENT_READ, None)
    told = False
    while True:
        for key, _ in selector.select(0.1):
            if key.data is None:
                pipe.recv()
                pipe.send(Received(sum(updates), nbytes, scrapes))
                continue
            content = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
            # A chunk of HTTP ends with "\r\n", and a line of the feed with "}\n".
            updates[key.data] += content.count(b"}\n")
            nbytes += len(content)
        if not told and all(updates):
            told = True
            pipe.send(None)
        if time.monotonic() >= scraped_s + 1.0:
            scraped_s = time.monotonic()
            scrapes += bool(_scrape(port))


def _scrape(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(_request("/metrics", port, "Connection: close\r\n"))
        return b"".join(iter(partial(connection.recv, 1 << 20), b""))


def _request(path: str, port: int, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{more}\r\n".encode()
