"""What a join, a ping and a push cost a real hub, with up to two thousand connections to it."""

import itertools
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

from benchmarks.children import Children
from benchmarks.exchange_clients import Round, Window, run_clients
from benchmarks.idle_processes import Looked, allow_many_files, run_control, run_hub, run_idle_devices
from benchmarks.report import Form, Results, show_progress
from edgeasync.policies.policy import Policy

LENGTH = 1000
"""Values of the model: 4 KB."""

PINGS_PER_S = 2000.0
"""Of all devices together, however many they are: only so can the cost of a ping be compared."""

BEYOND_S = 3.0
"""How much longer devices push: they must not leave before the hub is asked at the end, and it may be busy."""

PINGING_PROCESSES = 2
PUSHING_PROCESSES = 4


@dataclass(frozen=True)
class Effort:
    """How many connections, how long a pause before the measurement, and how long that takes."""

    connections: tuple[int, ...]
    settle_s: float
    seconds: float


EFFORTS = {
    Form.FULL: Effort((20, 200, 2000), 2.0, 15.0),
    Form.SHORT: Effort((20, 200, 2000), 1.0, 3.0),
    Form.QUICK: Effort((20,), 0.1, 0.5),
}


class Bench(Children):
    """A hub with its probes, a loop that does nothing else, and the processes of devices."""

    def __init__(self, folder: str, effort: Effort) -> None:
        allow_many_files()  # the processes of clients inherit this
        super().__init__("benchmarks.idle_processes", "benchmarks.exchange_clients")
        self._effort = effort
        self._folder = folder

    def __enter__(self) -> Self:
        self._hub = self.start(partial(run_hub, policy=Policy(), time_events=True), LENGTH, self._folder)
        self._address = str(self._hub.hear())
        self._control = self.start(run_control)
        return self

    def measure_pings(self, connections: int) -> dict[str, float]:
        """Let devices join and then only ping; return the columns of the table."""
        before = self._hub.ask()
        heartbeat_s = connections / PINGS_PER_S
        begun_s = time.monotonic()
        devices = [
            self.start(partial(run_idle_devices, heartbeat_s=heartbeat_s), self._address, first, last)
            for first, last in itertools.pairwise(_bounds(connections, PINGING_PROCESSES))
        ]
        for child in devices:
            child.hear()
        joined_s, joined = time.monotonic() - begun_s, self._hub.ask()
        time.sleep(self._effort.settle_s)
        cpu_s, looked, columns = self._look()
        _check_all_live(looked, connections)
        return {
            "all joined, s": joined_s,
            "hub CPU a join, us": 1e6 * (joined.cpu_s - before.cpu_s) / connections,
            "hub CPU a ping, us": 1e6 * cpu_s / max(1, looked.pings),
            "pings per second": looked.pings / self._effort.seconds,
            **columns,
        }

    def measure_pushes(self, connections: int) -> dict[str, float]:
        """Let devices join and push as soon as they are answered; return the columns of the table."""
        bounds = list(itertools.pairwise(_bounds(connections, PUSHING_PROCESSES)))
        devices = [self.start(run_clients, LENGTH) for _ in bounds]
        for child, (first, last) in zip(devices, bounds, strict=True):
            child.pipe.send(Round(self._address, tuple(f"pushing-{number}" for number in range(first, last))))
        for child in devices:
            child.hear()
        begin_s = time.monotonic() + self._effort.settle_s
        window = Window(begin_s, begin_s + self._effort.seconds + BEYOND_S)
        for child in devices:
            child.pipe.send(window)
        time.sleep(max(0.0, begin_s - time.monotonic()))
        cpu_s, looked, columns = self._look()
        _check_all_live(looked, connections)
        for child in devices:
            child.hear()
        return {
            "hub CPU a push, us": 1e6 * cpu_s / max(1, looked.pushes),
            "pushes per second": looked.pushes / self._effort.seconds,
            **columns,
        }

    def _look(self) -> tuple[float, Looked, dict[str, float]]:
        """Measure for some time; return the hub's processor seconds, what its probes saw, and columns of both."""
        before, _ = self._hub.ask(), self._control.ask()
        time.sleep(self._effort.seconds)
        looked, control = self._hub.ask(), self._control.ask()
        columns = {
            "slowest event, ms": looked.slowest_event_ms,
            "lag p99, ms": looked.lag_p99_ms,
            "lag max, ms": looked.lag_max_ms,
            "idle loop p99, ms": control.lag_p99_ms,
            "idle loop max, ms": control.lag_max_ms,
        }
        return looked.cpu_s - before.cpu_s, looked, columns


def _bounds(connections: int, processes: int) -> list[int]:
    return [connections * number // processes for number in range(processes + 1)]


def _check_all_live(looked: Looked, connections: int) -> None:
    if looked.live != connections:
        raise RuntimeError(f"{looked.live} devices are left of {connections}")


def measure_sockets(form: Form, results: Results) -> None:
    """Measure hubs with more and more connections, each with a new hub for pings and for pushes."""
    effort = EFFORTS[form]
    pushes: dict[int, float] = {}
    for connections in effort.connections:
        name = f"{connections:,} connections"
        show_progress(f"{name}: {effort.seconds:g} s of pings, {effort.seconds:g} s of pushes")
        with tempfile.TemporaryDirectory() as folder, Bench(folder, effort) as bench:
            _add(results, "joins and pings, real sockets", name, bench.measure_pings(connections))
        with tempfile.TemporaryDirectory() as folder, Bench(folder, effort) as bench:
            columns = bench.measure_pushes(connections)
            _add(results, "pushes of 4 KB, real sockets", name, columns)
        pushes[connections] = columns["hub CPU a push, us"]
    fewest, most = min(pushes), max(pushes)
    ratio = f"real sockets: hub CPU a push, {fewest} connections over {most:,}"
    results.ratios[ratio] = round(pushes[fewest] / pushes[most], 3)


def _add(results: Results, title: str, row: str, columns: Mapping[str, float]) -> None:
    results.add(title, row, {column: round(value, 2) for column, value in columns.items()})
