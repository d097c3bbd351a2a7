"""The processes of the idle benchmark: the hub with a probe in its loop, a loop with nothing else, the devices."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop
import zmq

from benchmarks.exchange_servers import POLICY, make_hub, make_settings
from edgeasync.core.hub.effects import HubEffect
from edgeasync.core.hub.events import HubEvent
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import Liveness
from edgeasync.host.host_info import prepare_for_service
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Hello, Ping, Welcome

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
    """What a probe measured since the last question: lateness of the loop, pings answered, live members.

    A hub whose core is timed also tells the core's slowest event. `cpu_s` is the process's time since its start.
    """

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    pings: int = 0
    pushes: int = 0
    live: int = 0
    slowest_event_ms: float = 0.0
    cpu_s: float = 0.0


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

    def look(self) -> Looked:
        """Return the measurements since the last call."""
        lags_ms = self._lags_ms or [0.0]
        self._lags_ms = []
        p50, p99, worst = (float(value) for value in np.percentile(lags_ms, (50, 99, 100)))
        return Looked(p50, p99, worst)


class SlowestEvent:
    """Times every event of the hub's core in this process, in the processor's time."""

    def __init__(self) -> None:
        self._slowest_s = 0.0
        handle = HubCore.handle

        def timed(core: HubCore, event: HubEvent, now_s: float) -> list[HubEffect]:
            begun_s = time.thread_time()
            try:
                return handle(core, event, now_s)
            finally:
                self._slowest_s = max(self._slowest_s, time.thread_time() - begun_s)

        HubCore.handle = timed  # type: ignore[assignment,method-assign]

    def look_ms(self) -> float:
        """Return the slowest since the last call."""
        slowest_s, self._slowest_s = self._slowest_s, 0.0
        return 1e3 * slowest_s


def run_hub(
    length: int,
    run: str,
    pipe: "Connection[Looked | str, None]",
    *,
    policy: Policy = POLICY,
    time_events: bool = False,
) -> None:
    """Run the real hub; send its address, then the measurements of its loop's probe whenever asked."""
    allow_many_files()
    prepare_for_service()
    settings = make_settings(policy=policy, liveness=Liveness(heartbeat_s=HEARTBEAT_S, lease_s=LEASE_S))
    hub = make_hub(length, run, pipe, settings)
    slowest = SlowestEvent() if time_events else None

    seen: Counter[str] = Counter()

    def describe(looked: Looked) -> Looked:
        nonlocal seen
        core = hub.core
        before, seen = seen, core.messages_accepted.copy()
        return replace(
            looked,
            pings=seen["ping"] - before["ping"],
            pushes=seen["push"] - before["push"],
            live=core.members.live_count,
            slowest_event_ms=0.0 if slowest is None else slowest.look_ms(),
            cpu_s=time.process_time(),
        )

    run_probed(hub.run, pipe, describe)


def run_control(pipe: "Connection[Looked, None]") -> None:
    """Run the probe in a loop with nothing else to do: what the machine itself adds."""
    run_probed(asyncio.Event().wait, pipe, lambda looked: looked)


def run_probed(
    work: Callable[[], Coroutine[Any, Any, object]],
    pipe: "Connection[Any, None]",
    describe: Callable[[Looked], object],
) -> None:
    """Run `work` with a probe in its loop; answer each question by what `describe` makes of its measurements."""

    async def serve() -> None:
        probe = LagProbe()

        def answer() -> None:
            pipe.recv()
            pipe.send(describe(probe.look()))

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        probing = asyncio.create_task(probe.run())
        try:
            await work()
        finally:
            probing.cancel()

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
        self._socket.send(wire.encode(Hello(f"idle-{self._number}", state_id, 1)))

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


def run_idle_devices(
    address: str, first: int, last: int, pipe: "Connection[None, None]", *, heartbeat_s: float = HEARTBEAT_S
) -> None:
    """Join as devices `first` to `last`, say so, and ping evenly over each heartbeat until killed."""
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
    _ping_evenly(devices, heartbeat_s)


def allow_many_files() -> None:
    """Let this process open as many files as it may: each connection is one or two."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _ping_evenly(devices: list[IdleDevice], heartbeat_s: float) -> None:
    """Let every device ping once a heartbeat, at even distances."""
    start_s = time.monotonic()
    rate = len(devices) / heartbeat_s
    sent = 0
    while True:
        due = int((time.monotonic() - start_s) * rate)
        for turn in range(sent, due):
            devices[turn % len(devices)].ping()
        sent = due
        time.sleep(NAP_S)
