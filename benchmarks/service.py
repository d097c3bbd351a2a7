"""A web service that holds two hubs: how late its event loop wakes, and how soon it ends.

Run as `python -m benchmarks.service`. The service is examples/service.py: aiohttp on uvloop, two hubs on the same
loop. Four agents together push updates of 1 MB ten times a second; meanwhile somebody follows the events of both
hubs and downloads a model every second. How late the loop wakes is measured inside the service and, at the same
time, in a process that does nothing else. Then SIGTERM: both models are on disk at their last version. It ends
with exit code 1 if a bound is broken.
"""

import contextlib
import http.client
import json
import multiprocessing
import signal
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.children import Child
from benchmarks.idle_processes import run_control
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.service_processes import HUBS, run_agents, run_service
from edgeasync import Run

LAG_MS_MAX = 20.0
END_S_MAX = 2.0
AGENTS = 4
UPDATES_PER_S = 10
DOWNLOAD_S = 1.0
START_S = 60.0


@dataclass(frozen=True)
class Effort:
    """The values of the model, and how long to measure after how long a pause."""

    length: int
    settle_s: float
    seconds: float


EFFORTS = {
    Form.FULL: Effort(1 << 18, 2.0, 60.0),
    Form.SHORT: Effort(1 << 18, 2.0, 15.0),
    Form.QUICK: Effort(1 << 12, 0.2, 1.0),
}


class Client:
    """Asks the service at a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.events = 0

    def ask(self, path: str) -> bytes:
        """Return what the service answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        connection.request("GET", path)
        with contextlib.closing(connection), connection.getresponse() as response:
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{path}: {response.status}")
            return response.read()

    def wait_until_up(self) -> dict[str, Any]:
        """Return the hubs of the service, once it answers."""
        ends_s = time.monotonic() + START_S
        while True:
            try:
                return dict(json.loads(self.ask("/hubs")))
            except ConnectionError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.05)

    def follow(self, name: str) -> None:
        """Read the events of a hub to their end, in a thread, and count them."""

        def read() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            connection.request("GET", f"/hubs/{name}/events")
            with contextlib.closing(connection), connection.getresponse() as response:
                for line in response:
                    self.events += line.startswith(b"event: ")

        threading.Thread(target=read, daemon=True).start()


def measure(effort: Effort, folder: str) -> dict[str, float]:
    """Measure one service; return the columns of the table."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.service_processes"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    service = context.Process(target=run_service, args=(port, folder, effort.length))
    service.start()
    control = agents = None
    try:
        client = Client(port)
        hubs = client.wait_until_up()
        for name in HUBS:
            client.follow(name)
        control = Child(context, run_control)
        addresses = [hubs[name]["address"] for name in HUBS for _ in range(AGENTS // len(HUBS))]
        agents = Child(context, run_agents, addresses, effort.length, AGENTS / UPDATES_PER_S)
        agents.hear()
        time.sleep(effort.settle_s)
        control.ask()
        client.ask("/lag")
        before = _updates(client)
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + effort.seconds:
            client.ask(f"/hubs/{HUBS[0]}/model")
            time.sleep(min(DOWNLOAD_S, effort.seconds))
        looked, idle = json.loads(client.ask("/lag")), control.ask()
        updates = _updates(client) - before
        seconds = time.monotonic() - begun_s
        versions = {name: hub["version"] for name, hub in client.wait_until_up().items()}
        ended_s = _end_s(service)
        for name, version in versions.items():
            if (left := Run.open(f"{folder}/{name}").version) < version:
                raise RuntimeError(f"version {left} of {name} is on disk, but {version} was the newest")
        agents.pipe.send(None)
    finally:
        for process in (service, *(child.process for child in (control, agents) if child is not None)):
            process.kill()
            process.join()
    return {
        "updates per second": updates / seconds,
        "MB an update": 4 * effort.length / 1e6,
        "events": client.events,
        "lag p50, ms": looked["lag_p50_ms"],
        "lag p99, ms": looked["lag_p99_ms"],
        "lag max, ms": looked["lag_max_ms"],
        "idle loop p99, ms": idle.lag_p99_ms,
        "SIGTERM to the end, s": ended_s,
    }


def _updates(client: Client) -> int:
    hubs = json.loads(client.ask("/hubs")).values()
    return sum(device["updates_applied"] for hub in hubs for device in hub["devices"])


def _end_s(service: Any) -> float:
    begun_s = time.monotonic()
    assert service.pid is not None
    signal_number = signal.SIGTERM
    service.terminate()
    service.join(START_S)
    if service.exitcode != 0:
        raise RuntimeError(f"the service ended with {service.exitcode} after signal {signal_number}")
    return time.monotonic() - begun_s


def main() -> None:
    """Measure the service."""
    arguments = make_parser("Loop lag of a web service that holds two hubs.").parse_args()
    effort, results = EFFORTS[arguments.form], Results()
    show_progress(f"{effort.seconds:g} s")
    with tempfile.TemporaryDirectory() as folder:
        columns = measure(effort, folder)
    for column, value in columns.items():
        results.add("service", column, {"measured": round(value, 3)})
    results.bound("loop lag p99", columns["lag p99, ms"], LAG_MS_MAX)
    results.bound("SIGTERM to both models on disk", columns["SIGTERM to the end, s"], END_S_MAX)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
