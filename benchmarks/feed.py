"""Measure what viewers of a fleet cost the hub.

Run as `python -m benchmarks.feed`. A real hub with a journal serves 10,000 devices, which are
simulated in its event loop. They ping every 5 s and push every 30 s. In alternate rounds, nobody
watches, or 50 viewers follow the page's feed over HTTP and one client scrapes `/metrics` once a
second. Each of these rounds is compared with the one before it, because the hub grows during its
first minutes, with or without viewers. Processor times are those of the hub's process in all
threads. The exit code is 1 if a bound is missed.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field

from benchmarks.feed_fleet import LookedAtFeed, Received, serve_crowd, watch_feed
from benchmarks.hub_process import Looked, run_control
from benchmarks.processes import Child, Children, resident_bytes
from benchmarks.report import Form, Results, benchmark, show_progress

JOIN_S = 300.0
"""Maximum time until all devices have joined."""

CPU_PERCENT_MAX = 3.0
LAG_P99_MS_MAX = 10.0
MEMORY_MB_MAX = 30.0


@dataclass(frozen=True)
class Effort:
    """Sizes and durations.

    A round lasts `seconds`, after `settle_s` in which viewers connect or the feed stops.
    """

    devices: int
    viewers: int
    rounds: int
    settle_s: float
    seconds: float


EFFORT = {
    Form.FULL: Effort(10_000, 50, 12, 8.0, 15.0),
    Form.SHORT: Effort(10_000, 50, 2, 8.0, 10.0),
    Form.QUICK: Effort(20, 2, 1, 0.5, 1.5),
}


@dataclass
class Rounds:
    """Measurements of the rounds of one kind."""

    cpu_percent: list[float] = field(default_factory=list)
    lag_p99_ms: list[float] = field(default_factory=list)
    lag_max_ms: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    work_max_ms: list[float] = field(default_factory=list)
    feed_percent: list[float] = field(default_factory=list)
    slowest_step_ms: list[float] = field(default_factory=list)
    idle_p99_ms: list[float] = field(default_factory=list)
    idle_max_ms: list[float] = field(default_factory=list)

    def measure(self, hub: Child, control: Child, effort: Effort) -> None:
        """Measure a round; `control` is an idle loop, which shows the machine's own lag."""
        time.sleep(effort.settle_s)
        control.ask()
        before: LookedAtFeed = hub.ask()
        begun_s = time.monotonic()
        time.sleep(effort.seconds)
        after: LookedAtFeed = hub.ask()
        passed_s = time.monotonic() - begun_s
        self.cpu_percent.append(100.0 * (after.hub.cpu_s - before.hub.cpu_s) / passed_s)
        self.lag_p99_ms.append(after.hub.lag_p99_ms)
        self.lag_max_ms.append(after.hub.lag_max_ms)
        self.work_max_ms.append(after.hub.work_max_ms)
        self.feed_percent.append(100.0 * after.feed_s / passed_s)
        self.slowest_step_ms.append(after.slowest_step_ms)
        idle: Looked = control.ask()
        self.idle_p99_ms.append(idle.lag_p99_ms)
        self.idle_max_ms.append(idle.lag_max_ms)
        self.resident_mb.append(resident_bytes(hub.process.pid) / 1e6)

    def columns(self) -> dict[str, float]:
        """Return the medians for a table."""
        return {
            "CPU, % of a core": statistics.median(self.cpu_percent),
            "loop lag p99, ms": statistics.median(self.lag_p99_ms),
            "slowest lag, ms": max(self.lag_max_ms),
            "most work at a time, ms": max(self.work_max_ms),
            "idle loop p99, ms": statistics.median(self.idle_p99_ms),
            "slowest idle lag, ms": max(self.idle_max_ms),
            "resident in the first round, MB": self.resident_mb[0],
            "in the last, MB": self.resident_mb[-1],
            "feed without sending, % of a core": statistics.median(self.feed_percent),
            "slowest step of the feed, ms": max(self.slowest_step_ms),
        }


def increases(closed: list[float], watched: list[float]) -> list[float]:
    """Return by how much each round with viewers exceeds the round without that precedes it."""
    return [after - before for before, after in zip(closed, watched, strict=True)]


def measure(effort: Effort, results: Results) -> None:
    """Measure alternate rounds without and with viewers."""
    closed, watched = Rounds(), Rounds()
    with tempfile.TemporaryDirectory() as run, Children("benchmarks.feed_fleet") as children:
        show_progress(f"{effort.devices:,} devices join")
        hub = children.start(serve_crowd, effort.devices, run)
        control = children.start(run_control)
        port = hub.hear(JOIN_S)
        for number in range(effort.rounds):
            show_progress(f"round {number + 1} of {effort.rounds}")
            closed.measure(hub, control, effort)
            viewers = children.start(watch_feed, port, effort.viewers)
            viewers.hear()
            begun: Received = viewers.ask()
            begun_s = time.monotonic()
            watched.measure(hub, control, effort)
            ended: Received = viewers.ask()
            passed_s = time.monotonic() - begun_s
            viewers.kill()
            columns = {
                "updates per second": (ended.updates - begun.updates) / effort.viewers / passed_s,
                "kB per second": (ended.nbytes - begun.nbytes) / effort.viewers / passed_s / 1e3,
                "whole update, kB": begun.nbytes / effort.viewers / 1e3,
                "scrapes per second": (ended.scrapes - begun.scrapes) / passed_s,
            }
        results.add("a viewer receives", f"{effort.devices:,} devices", columns)
    results.add("the hub", "page closed", closed.columns())
    results.add("the hub", f"{effort.viewers} viewers", watched.columns())
    more_cpu = increases(closed.cpu_percent, watched.cpu_percent)
    more_mb = increases(closed.resident_mb, watched.resident_mb)
    name = f"{effort.viewers} viewers of {effort.devices:,} devices"
    results.bound(f"{name}: more CPU, % of a core", statistics.median(more_cpu), CPU_PERCENT_MAX)
    results.bound(f"{name}: loop lag p99, ms", statistics.median(watched.lag_p99_ms), LAG_P99_MS_MAX)
    results.bound(f"{name}: more memory, MB", max(more_mb), MEMORY_MB_MAX)


@benchmark("What viewers of a fleet cost the hub.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure a fleet with and without viewers."""
    measure(EFFORT[arguments.form], results)


if __name__ == "__main__":
    main()
