"""A real hub with a probe, and thousands of devices that only join and ping."""

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import zmq

from benchmarks.exchange_clients import Round, Window, run_clients
from benchmarks.hub_process import HEARTBEAT_S, Looked, allow_many_files, run_control, serve_probed_hub
from benchmarks.processes import Child, Children, resident_bytes, shares
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Hello, Ping, Welcome

NAP_S = 0.001
JOIN_TIMEOUT_MS = 30_000
JOINING_MAX = 256
"""How many `Hello`s may be in flight."""

SOCKETS_MAX = 65_535
PROCESSES = 2


class IdleDevice:
    """A member that only pings."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, number: int) -> None:
        self._number = number
        self._ping = b""
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVTIMEO, JOIN_TIMEOUT_MS)
        self._socket.connect(address)

    def greet(self) -> None:
        """Send `Hello`."""
        state_id = self._number.to_bytes(16, "little")
        self._socket.send(wire.encode(Hello(f"idle-{self._number}", state_id, 1)))

    def enter(self) -> None:
        """Wait for the `Welcome`."""
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
    """Join as devices `first` to `last` and report it.

    Then ping, evenly spread over each heartbeat, until killed.
    """
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


def _ping_evenly(devices: list[IdleDevice], heartbeat_s: float) -> None:
    """Let every device ping once per heartbeat, at even distances."""
    start_s = time.monotonic()
    rate = len(devices) / heartbeat_s
    sent = 0
    while True:
        due = int((time.monotonic() - start_s) * rate)
        for turn in range(sent, due):
            devices[turn % len(devices)].ping()
        sent = due
        time.sleep(NAP_S)


class HubBench(Children):
    """A hub with a probe in its loop, an idle loop with a probe, and processes of devices."""

    def __init__(self, length: int, folder: str, serve: Callable[..., None] = serve_probed_hub) -> None:
        allow_many_files()  # client processes inherit this
        super().__init__("benchmarks.hub_bench", "benchmarks.exchange_clients", "benchmarks.exchange_servers")
        self._length = length
        self.hub = self.start(serve, length, folder)
        self._address = str(self.hub.hear())
        self._control = self.start(run_control)

    def join(self, first: int, last: int, *, heartbeat_s: float = HEARTBEAT_S) -> list[Child]:
        """Let idle devices join from a few processes; return these once all are members."""
        run = partial(run_idle_devices, heartbeat_s=heartbeat_s)
        started = [self.start(run, self._address, *share) for share in shares(first, last, PROCESSES)]
        for child in started:
            child.hear()
        return started

    def exchange(self, clients: int, processes: int, begin_s: float, seconds: float) -> list[Child]:
        """After a while, start clients that exchange as fast as they can; return their processes."""
        started = [self.start(run_clients, self._length) for _ in range(processes)]
        for child, (first, last) in zip(started, shares(0, clients, processes), strict=True):
            child.pipe.send(Round(self._address, tuple([f"client-{number}" for number in range(first, last)])))
        for child in started:
            child.hear()
        now_s = time.monotonic()
        for child in started:
            child.pipe.send(Window(now_s + begin_s, now_s + begin_s + seconds))
        return started

    def memory(self) -> int:
        """Return the hub's memory in bytes."""
        return resident_bytes(self.hub.process.pid)

    def look(self, seconds: float, live: int) -> tuple[float, Looked, dict[str, float]]:
        """Measure for some time; return the hub's CPU seconds, its probe's results and lag columns."""
        before, _ = self.hub.ask(), self._control.ask()
        time.sleep(seconds)
        looked, control = self.hub.ask(), self._control.ask()
        if looked.live != live:
            raise RuntimeError(f"{looked.live} of {live} devices are left")
        columns = {
            "lag p50, ms": looked.lag_p50_ms,
            "lag p99, ms": looked.lag_p99_ms,
            "lag max, ms": looked.lag_max_ms,
            "idle loop p99, ms": control.lag_p99_ms,
            "idle loop max, ms": control.lag_max_ms,
        }
        return looked.cpu_s - before.cpu_s, looked, columns
