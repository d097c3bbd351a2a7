"""Measure what thousands of waiting devices cost: processor, memory and loop lag.

Run as `python -m benchmarks.idle`. Every device is a real connection that joins and then pings once
a second, evenly spread. In the second case, two more devices exchange a model of ten million
parameters all the time, and the hub must answer heartbeats without waiting for their folds. The lag
of the hub's event loop is measured inside the hub and, at the same time, inside an idle process,
which shows the machine's own lag.

For memory, devices join a hub and then, in another process, a bare ROUTER. In both, libzmq uses
most of the memory per device. The difference is ours. The last case is a hub with a large model:
half of its members are connected, the other half are gone, and two exchange.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.exchange_servers import serve_bare
from benchmarks.hub_bench import HubBench
from benchmarks.hub_process import LEASE_S, allow_many_files, serve_probed_hub
from benchmarks.processes import peak_resident_bytes
from benchmarks.report import Form, Results, benchmark, show_progress

LAG_BOUND_MS = 10.0
SMALL, LARGE = 1000, 2_500_000
"""Model lengths of the hubs whose memory is measured: 4 KB and 10 MB."""

MEMBER_BYTES_MAX = 4096
HUB_BYTES_MAX = 320e6
EXCHANGING = 2
PARTS = ("lag", "memory")


@dataclass(frozen=True)
class Case:
    """The devices that exchange while the others idle."""

    name: str
    length: int
    exchanging: int


@dataclass(frozen=True)
class Effort:
    """How much to measure; `settle_s` is the pause between the last join and the measurement.

    The memory part uses `members`, some rounds and a model length.
    """

    cases: tuple[Case, ...]
    devices: int
    settle_s: float
    seconds: float
    members: int
    length: int
    rounds: int


CASES = (Case("idle", 1_000, 0), Case("idle + 2 x 10M exchanging", 10_000_000, 2))
TINY_CASES = (CASES[0], Case("idle + 2 x 1M exchanging", 1_000_000, 2))
EFFORTS = {
    Form.FULL: Effort(CASES, 5_000, 2.0, 20.0, 5_000, LARGE, 3),
    Form.SHORT: Effort(CASES, 500, 2.0, 5.0, 5_000, LARGE, 1),
    Form.QUICK: Effort(TINY_CASES, 20, 0.2, 0.5, 20, SMALL, 1),
}


def measure_lag(case: Case, effort: Effort, bench: HubBench) -> dict[str, float]:
    """Let all devices join, then measure for some time; return the table's columns."""
    devices, before, begun_s = effort.devices, bench.memory(), time.monotonic()
    bench.join(0, devices)
    joined_s, bytes_joined = time.monotonic() - begun_s, bench.memory()
    exchanging = bench.exchange(case.exchanging, case.exchanging, effort.settle_s, effort.seconds + 0.5)
    time.sleep(effort.settle_s)
    cpu_s, looked, columns = bench.look(effort.seconds, devices + case.exchanging)
    memory = bench.memory()
    return {
        "devices": devices,
        "all joined, s": joined_s,
        "hub CPU, %": 100.0 * cpu_s / effort.seconds,
        "resident, MB": memory / 1e6,
        "bytes a device": (bytes_joined - before) / devices,
        "pongs per second": looked.pings / effort.seconds,
        "updates per second": sum(child.hear().updates_per_s for child in exchanging),
        **columns,
    }


def run_bare(length: int, run: str, pipe: "Connection[str, None]") -> None:
    """Run a ROUTER that answers `Hello` and stores nothing about a device."""
    allow_many_files()
    serve_bare(length, run, pipe)


def bytes_a_device(devices: int, bench: HubBench) -> float:
    """Return a server's memory growth per device that joins."""
    bench.join(0, 1)  # the first device's share belongs to the server itself
    before = bench.memory()
    bench.join(1, devices + 1)
    return (bench.memory() - before) / devices


def measure_devices(devices: int, rounds: int, results: Results) -> None:
    """Compare the memory per device of a hub and of a bare ROUTER."""
    beyond = []
    for number in range(rounds):
        show_progress(f"{devices:,} devices at a bare ROUTER and at a hub: {number + 1} of {rounds}")
        grown = []
        for serve in (run_bare, serve_probed_hub):
            with tempfile.TemporaryDirectory() as folder, HubBench(SMALL, folder, serve) as bench:
                grown.append(bytes_a_device(devices, bench))
        bare, ours = grown
        beyond.append(ours - bare)
        columns = {"bare ROUTER": bare, "hub": ours, "difference": ours - bare}
        results.add("bytes a device", f"round {number + 1}", columns, 0)
    results.bound("bytes a device beyond a bare ROUTER", statistics.median_low(beyond), MEMBER_BYTES_MAX)


def measure_large(devices: int, length: int, seconds: float, results: Results) -> None:
    """Measure a hub's memory with all members, half of them gone, and its peak while two exchange."""
    show_progress(f"{2 * devices:,} members, half of them connected, {4e-6 * length:g} MB of model")
    with tempfile.TemporaryDirectory() as folder, HubBench(length, folder) as bench:
        alone = bench.memory()
        for gone in bench.join(0, devices):
            gone.kill()
        time.sleep(2 * LEASE_S)
        bench.join(devices, 2 * devices - EXCHANGING)
        (exchanging,) = bench.exchange(EXCHANGING, 1, 1.0, seconds)
        joined = bench.memory()
        exchanging.hear()
        if not devices - EXCHANGING <= (live := bench.hub.ask().live) <= devices:
            raise RuntimeError(f"{live} of {devices} devices are live")
        peak = peak_resident_bytes(bench.hub.process.pid)
    found = {"hub alone": alone, "all joined": joined, "peak, two exchanging": peak}
    results.add("a large fleet, MB", "hub", {name: nbytes / 1e6 for name, nbytes in found.items()}, 1)
    results.bound(f"{2 * devices:,} members, half connected, MB", joined / 1e6, HUB_BYTES_MAX / 1e6)


@benchmark("Processor, memory and loop lag of a hub with thousands of idle devices.", PARTS)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the requested parts."""
    effort = EFFORTS[arguments.form]
    for case in effort.cases if "lag" in arguments.part else ():
        name = f"{effort.devices:,} {case.name}"
        show_progress(f"{name}: {effort.seconds:g} s")
        with tempfile.TemporaryDirectory() as folder, HubBench(case.length, folder) as bench:
            columns = measure_lag(case, effort, bench)
        for column, value in columns.items():
            results.add("hub", column, {name: value})
        results.ratio(f"{name}: 10 ms over loop lag p99", LAG_BOUND_MS / max(columns["lag p99, ms"], 0.1), 1.0)
    if "memory" in arguments.part:
        measure_devices(effort.members, effort.rounds, results)
        measure_large(effort.members, effort.length, effort.seconds / 2, results)


if __name__ == "__main__":
    main()
