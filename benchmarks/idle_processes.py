"""The processes of the idle benchmark: the hub with a probe in its loop, a loop with nothing else, the devices."""

import asyncio
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import uvloop
import zmq

from benchmarks.exchange_servers import make_hub, make_settings
from edgeasync.core.hub.settings import Liveness
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSION, Hello, Ping, Welcome

HEARTBEAT_S = 1.0
LEASE_S = 5.0
PROBE_S = 0.005
NAP_S = 0.001
JOIN_TIMEOUT_MS = 30_000
JOINING_MAX = 256
"""How many hellos are in flight at a time."""

SOCKETS_MAX = 65_535


@dataclass(frozen=True)
class Looked:
    """What a probe measured since the last question: lateness of the loop, pings answered, live members."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    pings: int
    live: int


class LagProbe:
    """Wakes every 5 ms and writes down how much later than that it really was."""

    def __init__(self) -> None:
        self._lags_ms: list[float] = []

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due_s = time.monotonic() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self._lags_ms.append(max(0.0, 1e3 * (time.monotonic() - due_s)))

    def look(self, pings: int = 0, live: int = 0) -> Looked:
        """Return the measurements since the last call."""
        lags_ms = self._lags_ms or [0.0]
        self._lags_ms = []
        p50, p99, worst = (float(value) for value in np.percentile(lags_ms, (50, 99, 100)))
        return Looked(p50, p99, worst, pings, live)


def run_hub(length: int, run: str, pipe: "Connection[Looked | str, None]") -> None:
    """Run the real hub; send its address, then the measurements of its loop's probe whenever asked."""
    allow_many_files()

    hub = make_hub(length, run, pipe, make_settings(liveness=Liveness(heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S)))

    async def serve() -> None:
        probe, loop, seen = LagProbe(), asyncio.get_running_loop(), 0

        def answer() -> None:
            nonlocal seen
            pipe.recv()
            core = hub.core
            pings = core.messages_accepted["ping"]
            pipe.send(probe.look(pings - seen, core.members.live_count))
            seen = pings

        loop.add_reader(pipe.fileno(), answer)
        probing = asyncio.create_task(probe.run())
        try:
            await hub.run()
        finally:
            probing.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def run_control(pipe: "Connection[Looked, None]") -> None:
    """Run the probe in a loop with nothing else to do: what the machine itself adds."""

    async def serve() -> None:
        probe = LagProbe()

        def answer() -> None:
            pipe.recv()
            pipe.send(probe.look())

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        await probe.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


class IdleDevice:
    """A member that does nothing but ping."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, number: int) -> None:
        self._number = number
        self._ping = b""
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVTIMEO, JOIN_TIMEOUT_MS)
        self._socket.connect(address)

    def greet(self) -> None:
        """Say hello."""
        state_id = self._number.to_bytes(16, "little")
        self._socket.send(wire.encode(Hello((PROTOCOL_VERSION,), f"idle-{self._number}", state_id, 1)))

    def enter(self) -> None:
        """Wait for the welcome."""
        welcome = wire.decode(self._socket.recv())
        if not isinstance(welcome, Welcome):
            raise TypeError(f"{welcome} instead of a welcome")
        self._ping = wire.encode(Ping(welcome.session, 0.0, 0))

    def ping(self) -> None:
        """Read the answers since the last ping, and send the next ping."""
        try:
            while True:
                self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._socket.send(self._ping, zmq.NOBLOCK)


def run_idle_devices(address: str, first: int, last: int, pipe: "Connection[None, None]") -> None:
    """Join as devices `first` to `last`, say so, and ping evenly over each second until killed."""
    allow_many_files()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
    devices = []
    for start in range(first, last, JOINING_MAX):
        joining = [IdleDevice(context, address, number) for number in range(start, min(start + JOINING_MAX, last))]
        for device in joining:
            device.greet()
        for device in joining:
            device.enter()
        devices += joining
    pipe.send(None)
    _ping_evenly(devices)


def allow_many_files() -> None:
    """Let this process open as many files as it may: each connection is one or two."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _ping_evenly(devices: list[IdleDevice]) -> None:
    """Let every device ping once a heartbeat, at even distances."""
    start_s = time.monotonic()
    rate = len(devices) / HEARTBEAT_S
    sent = 0
    while True:
        due = int((time.monotonic() - start_s) * rate)
        for turn in range(sent, due):
            devices[turn % len(devices)].ping()
        sent = due
        time.sleep(NAP_S)
