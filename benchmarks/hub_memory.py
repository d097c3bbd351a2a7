"""How much memory a device costs the hub, beside a ROUTER that keeps nothing, and how much a large fleet takes.

Run as `python -m benchmarks.hub_memory`. First devices connect, join and ping: to a hub, and to a bare ROUTER in a
process of its own. What both grow by is mostly libzmq's; the difference is ours. Then a hub with a large model has
members whose connections are gone, as many again that are connected, and two that exchange. It ends with exit
code 1 if a bound is missed.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.children import Child, Children
from benchmarks.exchange_clients import Round, Window, run_clients
from benchmarks.exchange_servers import serve_bare
from benchmarks.idle_processes import LEASE_S, allow_many_files, run_hub, run_idle_devices
from benchmarks.processes import peak_resident_bytes, resident_bytes
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results

SMALL = 1000
LARGE = 2_500_000
"""Values of the models: 4 KB and 10 MB."""

MEMBER_BYTES_MAX = 4096
HUB_BYTES_MAX = 320e6
EXCHANGING = 2
PROCESSES = 2


@dataclass(frozen=True)
class Effort:
    """How many devices join, of how large a model the large fleet's is, and for how long it exchanges."""

    devices: int
    length: int
    seconds: float
    rounds: int


EFFORTS = {
    Form.FULL: Effort(5000, LARGE, 10.0, 3),
    Form.SHORT: Effort(5000, LARGE, 5.0, 1),
    Form.QUICK: Effort(20, SMALL, 0.5, 1),
}


def run_bare(pipe: "Connection[str, None]") -> None:
    """Run a ROUTER that answers a hello, and keeps nothing of a device."""
    allow_many_files()
    serve_bare(SMALL, "", pipe)


class Bench(Children):
    """A server, and devices."""

    def __init__(self) -> None:
        allow_many_files()  # the processes of clients inherit this
        super().__init__("benchmarks.idle_processes", "benchmarks.exchange_clients")

    def join(self, address: str, first: int, last: int) -> list[Child]:
        """Let devices connect, join, and ping."""
        steps = [first + (last - first) * number // PROCESSES for number in range(PROCESSES + 1)]
        children = [self.start(run_idle_devices, address, *pair) for pair in itertools.pairwise(steps)]
        for child in children:
            child.hear()
        return children


def bytes_a_device(target: Callable[..., None], devices: int, *arguments: object) -> float:
    """Return by how much a server grows for each device that joins."""
    with Bench() as bench:
        server = bench.start(target, *arguments)
        address = server.hear()
        bench.join(address, 0, 1)  # what the first device brings is the server's own
        before = resident_bytes(server.process.pid)
        bench.join(address, 1, devices + 1)
        return (resident_bytes(server.process.pid) - before) / devices


def large_fleet(effort: Effort, folder: str) -> tuple[float, float, float]:
    """Return a hub's memory with all its members, its peak once two of them have exchanged, and before any."""
    with Bench() as bench:
        hub = bench.start(run_hub, effort.length, folder)
        address = hub.hear()
        alone = resident_bytes(hub.process.pid)
        for gone in bench.join(address, 0, effort.devices):
            gone.kill()
        time.sleep(2 * LEASE_S)
        bench.join(address, effort.devices, 2 * effort.devices - EXCHANGING)
        exchanging = bench.start(run_clients, effort.length)
        exchanging.pipe.send(Round(address, tuple([f"exchanging-{number}" for number in range(EXCHANGING)])))
        exchanging.hear()
        joined = resident_bytes(hub.process.pid)
        begin_s = time.monotonic()
        exchanging.pipe.send(Window(begin_s, begin_s + effort.seconds))
        exchanging.hear()
        looked = hub.ask()
        connected = effort.devices
        if not connected - EXCHANGING <= looked.live <= connected:
            raise RuntimeError(f"{looked.live} devices are live of {connected}")
        return joined, peak_resident_bytes(hub.process.pid), alone


def main() -> None:
    """Measure both, and hold them to their bounds."""
    arguments = make_parser("The hub's memory for its devices.").parse_args()
    effort = EFFORTS[arguments.form]
    results = Results()
    beyond = []
    for number in range(effort.rounds):
        show_progress(f"{effort.devices:,} devices at a bare ROUTER and at a hub: {number + 1} of {effort.rounds}")
        bare = bytes_a_device(run_bare, effort.devices)
        with tempfile.TemporaryDirectory() as folder:
            ours = bytes_a_device(run_hub, effort.devices, SMALL, folder)
        beyond.append(ours - bare)
        columns = {"bare ROUTER": bare, "hub": ours, "difference": ours - bare}
        results.add(
            "bytes a device", f"round {number + 1}", {name: round(value) for name, value in columns.items()}
        )
    results.bound("bytes a device beyond a bare ROUTER", sorted(beyond)[len(beyond) // 2], MEMBER_BYTES_MAX)
    show_progress(f"{2 * effort.devices:,} members, half of them connected, {4e-6 * effort.length:g} MB of model")
    with tempfile.TemporaryDirectory() as folder:
        joined, exchanged, alone = large_fleet(effort, folder)
    columns = {"hub alone": alone, "all joined": joined, "peak, two exchanging": exchanged}
    results.add("a large fleet, MB", "hub", {name: round(value / 1e6, 1) for name, value in columns.items()})
    results.bound(f"{2 * effort.devices:,} members, half connected, MB", joined / 1e6, HUB_BYTES_MAX / 1e6)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
