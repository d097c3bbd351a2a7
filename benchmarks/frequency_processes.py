"""The processes of the frequency benchmark: agents whose speed can be changed, and a link whose rate can.

A shared number controls each of them: the seconds of a local step, the bytes a second that may pass.
"""

import asyncio
import math
import socket
import time
from ctypes import c_double
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from edgeasync.core.device.events import DeviceEvent, ModelInstalled
from edgeasync.data.dataset import Dataset
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.protocol.messages import Welcome
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.training.plan import read_plan
from edgeasync.training.trainer import StepResult, Trainer
from tests.support.parts.agents import agent_parts

CHUNK_BYTES = 1250
"""How many bytes pass a limited link at a time: 10 ms at 1 Mbit/s."""

UNLIMITED_CHUNK_BYTES = 1 << 16
LATE_S = 0.005
"""How late a chunk may be for the next one to make up for it: timers are coarse."""

BUFFER_BYTES = 4096


@dataclass(frozen=True)
class Assigned:
    """An assignment as the device got it."""

    at_s: float
    local_steps: int


class PacedTrainer:
    """Stretches every local step of another trainer to the seconds of the shared number."""

    def __init__(self, trainer: Trainer, step_s: c_double) -> None:
        self._trainer = trainer
        self._step_s = step_s

    @property
    def spec(self) -> ParameterSpec:
        """The other trainer's spec."""
        return self._trainer.spec

    def begin(self, parameters: Vector) -> None:
        """Begin an assignment."""
        self._trainer.begin(parameters)

    def step(self) -> StepResult:
        """Take a step, then wait until the time of a step has passed."""
        started_s = time.perf_counter()
        result = self._trainer.step()
        time.sleep(max(0.0, self._step_s.value - (time.perf_counter() - started_s)))
        return result


def run_agent(
    address: str, number: int, data: Dataset, step_s: c_double, pipe: "Connection[Assigned, None]"
) -> None:
    """Train for the hub until killed; send every assignment through the pipe."""

    def make_trainer(welcome: Welcome) -> Trainer:
        return PacedTrainer(read_plan(welcome.settings).make_trainer(data, number), step_s)

    def note(event: DeviceEvent) -> None:
        if isinstance(event, ModelInstalled):
            pipe.send(Assigned(time.monotonic(), event.assignment.local_steps))

    agent = AgentRuntime(
        *agent_parts(
            make_trainer,
            identity=DeviceIdentity(f"device-{number}", f"{number:032x}", 1),
            hub=address,
            examples=len(data),
        ),
        observe=note,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(agent.run())


def run_link(host: str, port: int, bytes_per_s: c_double, pipe: "Connection[int, None]") -> None:
    """Stand between an agent and its hub until killed; tell the port that the agent is to connect to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        listener.setblocking(False)
        pipe.send(listener.getsockname()[1])
        asyncio.run(_serve(listener, (host, port), bytes_per_s))


async def _serve(listener: socket.socket, hub: tuple[str, int], bytes_per_s: c_double) -> None:
    loop = asyncio.get_running_loop()
    under_way: set[asyncio.Task[None]] = set()
    while True:
        device, _ = await loop.sock_accept(listener)
        task = loop.create_task(_join(device, hub, bytes_per_s))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


async def _join(device: socket.socket, hub: tuple[str, int], bytes_per_s: c_double) -> None:
    """Carry bytes both ways until one side has closed its connection."""
    with device, socket.socket() as onward:
        onward.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        onward.setblocking(False)
        await asyncio.get_running_loop().sock_connect(onward, hub)
        for end in (device, onward):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = [
            asyncio.create_task(_carry(source, target, bytes_per_s))
            for source, target in ((device, onward), (onward, device))
        ]
        _, pending = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in pending:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _carry(source: socket.socket, target: socket.socket, bytes_per_s: c_double) -> None:
    """Pass bytes on, each chunk after the time that it takes at the present rate."""
    loop = asyncio.get_running_loop()
    free_at_s = 0.0
    while True:
        limited = math.isfinite(bytes_per_s.value)
        chunk = await loop.sock_recv(source, CHUNK_BYTES if limited else UNLIMITED_CHUNK_BYTES)
        if not chunk:
            return
        now_s = loop.time()
        free_at_s = max(free_at_s, now_s - LATE_S) + len(chunk) / bytes_per_s.value
        if free_at_s > now_s:
            await asyncio.sleep(free_at_s - now_s)
        await loop.sock_sendall(target, chunk)
