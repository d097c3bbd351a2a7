"""What devices cost that only wait: processor, memory and the hub's reaction time with thousands of them.

Run as `python -m benchmarks.idle`. Every device is a real connection that joins and then pings once a second,
the pings spread evenly. In the second case two more devices exchange a model of ten million parameters all the
while: answering heartbeats must not wait for their folds. How late the hub's event loop wakes is measured inside
the hub, and at the same time inside a process that does nothing else, which tells what the machine itself adds.
"""

import itertools
import tempfile
import time
from dataclasses import dataclass
from typing import Self

from benchmarks.children import Child, Children
from benchmarks.exchange_clients import Counted, Round, Window, run_clients
from benchmarks.idle_processes import run_control, run_hub, run_idle_devices
from benchmarks.processes import cpu_seconds, resident_bytes
from benchmarks.report import Form, Results, make_parser, show_progress, show_results

LAG_BOUND_MS = 10.0
DEVICE_PROCESSES = 2


@dataclass(frozen=True)
class Case:
    """The devices that exchange beside the idle ones."""

    name: str
    length: int
    exchanging: int


@dataclass(frozen=True)
class Effort:
    """How much to measure, and how long; `settle_s` is the pause between the last join and the measurement."""

    cases: tuple[Case, ...]
    devices: int
    settle_s: float
    seconds: float


CASES = (Case("idle", 1_000, 0), Case("idle + 2 x 10M exchanging", 10_000_000, 2))
TINY_CASES = (CASES[0], Case("idle + 2 x 1M exchanging", 1_000_000, 2))
EFFORTS = {
    Form.FULL: Effort(CASES, 5_000, 2.0, 20.0),
    Form.SHORT: Effort(CASES, 500, 2.0, 5.0),
    Form.QUICK: Effort(TINY_CASES, 20, 0.2, 0.5),
}


class Bench(Children):
    """The processes of one case."""

    def __init__(self, case: Case, effort: Effort, folder: str) -> None:
        super().__init__("benchmarks.idle_processes", "benchmarks.exchange_clients")
        self._case = case
        self._devices = effort.devices
        self._effort = effort
        self._folder = folder

    def __enter__(self) -> Self:
        self._hub = self.start(run_hub, self._case.length, f"{self._folder}/{self._case.length}")
        self._address = str(self._hub.hear())
        self._control = self.start(run_control)
        self._bytes_before = resident_bytes(self._hub.process.pid)
        return self

    def measure(self) -> dict[str, float]:
        """Let all devices join, then measure for some time; return the columns of the table."""
        seconds = self._effort.seconds
        joined_s = self._join()
        bytes_joined = resident_bytes(self._hub.process.pid)
        exchanging = self._start_exchanging(seconds)
        time.sleep(self._effort.settle_s)
        for child in (self._hub, self._control):
            child.ask()
        begin_s, cpu_s = time.monotonic(), cpu_seconds(self._hub.process.pid)
        time.sleep(seconds)
        looked, control = self._hub.ask(), self._control.ask()
        elapsed_s = time.monotonic() - begin_s
        cpu_s = cpu_seconds(self._hub.process.pid) - cpu_s
        counted = [child.hear() for child in exchanging]
        rate = sum(found.updates_per_s for found in counted if isinstance(found, Counted))
        if looked.live != self._devices + self._case.exchanging:
            raise RuntimeError(f"{looked.live} devices are left of {self._devices + self._case.exchanging}")
        return {
            "devices": self._devices,
            "all joined, s": joined_s,
            "hub CPU, %": 100.0 * cpu_s / elapsed_s,
            "resident, MB": resident_bytes(self._hub.process.pid) / 1e6,
            "bytes a device": (bytes_joined - self._bytes_before) / self._devices,
            "pongs per second": looked.pings / elapsed_s,
            "updates per second": rate,
            "lag p50, ms": looked.lag_p50_ms,
            "lag p99, ms": looked.lag_p99_ms,
            "lag max, ms": looked.lag_max_ms,
            "idle loop p99, ms": control.lag_p99_ms,
        }

    def _join(self) -> float:
        """Start the idle devices; return how long it took until the last one was a member."""
        start_s = time.monotonic()
        bounds = [self._devices * number // DEVICE_PROCESSES for number in range(DEVICE_PROCESSES + 1)]
        children = [
            self.start(run_idle_devices, self._address, first, last) for first, last in itertools.pairwise(bounds)
        ]
        for child in children:
            child.hear()
        return time.monotonic() - start_s

    def _start_exchanging(self, seconds: float) -> list[Child]:
        """Start the devices that exchange; they stop shortly after the measurement."""
        children = [self.start(run_clients, self._case.length) for _ in range(self._case.exchanging)]
        for number, child in enumerate(children):
            child.pipe.send(Round(self._address, (f"exchanging-{number}",)))
        for child in children:
            child.hear()
        begin_s = time.monotonic() + self._effort.settle_s
        for child in children:
            child.pipe.send(Window(begin_s, begin_s + seconds + 0.5))
        return children


def main() -> None:
    """Measure both cases."""
    parser = make_parser("Processor, memory and loop lag of a hub with thousands of idle devices.")
    arguments = parser.parse_args()
    effort = EFFORTS[arguments.form]
    results = Results()
    for case in effort.cases:
        name = f"{effort.devices:,} {case.name}"
        show_progress(f"{name}: {effort.seconds:g} s")
        with tempfile.TemporaryDirectory() as folder, Bench(case, effort, folder) as bench:
            columns = bench.measure()
        for column, value in columns.items():
            results.add("hub", column, {name: round(value, 3)})
        ratio_name = f"{name}: 10 ms over loop lag p99"
        results.ratios[ratio_name] = round(LAG_BOUND_MS / max(columns["lag p99, ms"], 0.1), 3)
        results.targets[ratio_name] = 1.0
    show_results(results, arguments)


if __name__ == "__main__":
    main()
