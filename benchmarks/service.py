"""Measure a web service with two hubs: its loop's lag, and how soon it ends.

Run as `python -m benchmarks.service`. The service is examples/service.py: aiohttp on uvloop, with
two hubs on the same loop. Four agents together push updates of 1 MB ten times a second. Meanwhile a
client follows the events of both hubs and downloads a model every second. The lag is measured
inside the service and, at the same time, in an idle process. Then the service receives SIGTERM and
must save both models at their last version. The exit code is 1 if a bound is exceeded.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import logging
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from aiohttp import web

from benchmarks.agent_process import Waits
from benchmarks.hub_process import LagProbe, make_spec, run_control
from benchmarks.processes import Child, Children
from benchmarks.report import Form, Results, benchmark, show_progress
from edgeasync import Agent, Hub, Policy, Run
from edgeasync.host.host_info import prepare_for_service
from edgeasync.policies.frequency import FixedFrequency

EXAMPLES = Path(__file__).parents[1] / "examples"
HUBS = ("one", "other")


def run_service(port: int, run: str, length: int, pipe: "Connection[None, None]") -> None:  # noqa: ARG001
    """Serve as the example does until SIGTERM, with one more route for the loop's lag."""
    sys.path.insert(0, str(EXAMPLES))
    from service import make_app  # type: ignore[import-not-found]  # noqa: PLC0415

    prepare_for_service()
    probe = LagProbe()

    async def hold(_: web.Application) -> AsyncIterator[None]:
        probing = asyncio.create_task(probe.run())
        yield
        probing.cancel()

    async def look(_: web.Request) -> web.Response:
        return web.json_response(asdict(probe.look()))

    hubs = {
        name: Hub(
            {"weights": np.zeros(length, np.float32)},
            run=f"{run}/{name}",
            bind="tcp://127.0.0.1:*",
            policy=Policy(frequency=FixedFrequency(local_steps=1)),
            settings={"codec": {"push": "identity"}},
        )
        for name in HUBS
    }
    app = make_app(hubs, loss=0.0)
    app.cleanup_ctx.append(hold)
    app.add_routes([web.get("/lag", look)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, loop=uvloop.new_event_loop())


def run_agents(addresses: Sequence[str], length: int, period_s: float, pipe: "Connection[None, None]") -> None:
    """Train in this process as one agent per address.

    It reports when all have joined, then trains until the pipe tells it to stop.
    """
    logging.disable()  # otherwise they report at the end that their hub is gone
    agents = [
        Agent(address, trainer=Waits(make_spec(length), period_s, 1e-6), name=f"device-{number}").start()
        for number, address in enumerate(addresses)
    ]
    for agent in agents:
        agent.wait_until_joined(60.0)
    pipe.send(None)
    pipe.recv()
    for agent in agents:
        agent.stop()
    for agent in agents:
        agent.wait()


LAG_MS_MAX = 20.0
END_S_MAX = 2.0
AGENTS = 4
PERIOD_S = 0.38
"""Step time of an agent, such that all agents together push ten times a second."""

DOWNLOAD_S = 1.0
START_S = 60.0


@dataclass(frozen=True)
class Effort:
    """The model's length, and how long to wait and to measure."""

    length: int
    settle_s: float
    seconds: float


EFFORTS = {
    Form.FULL: Effort(1 << 18, 2.0, 60.0),
    Form.SHORT: Effort(1 << 18, 2.0, 15.0),
    Form.QUICK: Effort(1 << 12, 0.2, 1.0),
}


class Client:
    """Sends requests to the service on a local port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.events = 0

    def ask(self, path: str) -> bytes:
        """Return the service's answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        connection.request("GET", path)
        with contextlib.closing(connection), connection.getresponse() as response:
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{path}: {response.status}")
            return response.read()

    def wait_until_up(self) -> dict[str, Any]:
        """Return the service's hubs once it answers."""
        ends_s = time.monotonic() + START_S
        while True:
            try:
                return dict(json.loads(self.ask("/hubs")))
            except ConnectionError:
                if time.monotonic() > ends_s:
                    raise
                time.sleep(0.05)

    def follow(self, name: str) -> None:
        """Read a hub's events to their end, in a thread, and count them."""

        def read() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            connection.request("GET", f"/hubs/{name}/events")
            with contextlib.closing(connection), connection.getresponse() as response:
                for line in response:
                    self.events += line.startswith(b"event: ")

        threading.Thread(target=read, daemon=True).start()


def measure(effort: Effort, folder: str) -> dict[str, float]:
    """Measure one service; return the table's columns."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with Children("benchmarks.service") as children:
        service = children.start(run_service, port, folder, effort.length)
        client = Client(port)
        hubs = client.wait_until_up()
        for name in HUBS:
            client.follow(name)
        addresses = [hubs[name]["address"] for name in HUBS for _ in range(AGENTS // len(HUBS))]
        control = children.start(run_control)
        agents = children.start(run_agents, addresses, effort.length, PERIOD_S)
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


def _end_s(service: Child) -> float:
    begun_s = time.monotonic()
    service.process.terminate()
    service.process.join(START_S)
    if service.process.exitcode != 0:
        raise RuntimeError(f"the service ended with {service.process.exitcode} after SIGTERM")
    return time.monotonic() - begun_s


@benchmark("Loop lag of a web service with two hubs.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure the service."""
    effort = EFFORTS[arguments.form]
    show_progress(f"{effort.seconds:g} s")
    with tempfile.TemporaryDirectory() as folder:
        columns = measure(effort, folder)
    for column, value in columns.items():
        results.add("service", column, {"measured": value})
    results.bound("loop lag p99", columns["lag p99, ms"], LAG_MS_MAX)
    results.bound("SIGTERM to both models on disk", columns["SIGTERM to the end, s"], END_S_MAX)


if __name__ == "__main__":
    main()
