"""The processes of the service benchmark: the example's service with a probe in its loop, and the agents."""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop
from aiohttp import web

from benchmarks.idle_processes import LagProbe
from edgeasync import Agent, Hub, Parameter, ParameterSpec, Policy, StepResult, Vector
from edgeasync.host.host_info import prepare_for_service
from edgeasync.policies.frequency import FixedFrequency

EXAMPLES = Path(__file__).parents[1] / "examples"
HUBS = ("one", "other")


def spec_of(length: int) -> ParameterSpec:
    """Return a model of one vector."""
    return ParameterSpec((Parameter("weight", (length,)),))


def run_service(port: int, run: str, length: int) -> None:
    """Serve until SIGTERM, as the example does, with a route more: what the probe in its loop has measured."""
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
            {"weight": np.zeros(length, np.float32)},
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


class Paced:
    """A trainer that takes a step in every period, and no time beside."""

    def __init__(self, length: int, period_s: float) -> None:
        self.spec = spec_of(length)
        self._period_s = period_s
        self._due_s = time.monotonic()

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._parameters = parameters

    def step(self) -> StepResult:
        """Wait for the period's end, and move a little."""
        self._due_s += self._period_s
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._parameters += 1e-6
        return StepResult(1.0, 1)


def run_agents(addresses: Sequence[str], length: int, period_s: float, pipe: "Connection[None, None]") -> None:
    """Train as one agent for each address, all in this process; say that they have joined, and wait to be told."""
    logging.disable()  # that their hub is gone, in the end
    agents = [
        Agent(address, trainer=Paced(length, period_s), name=f"device-{number}").start()
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
