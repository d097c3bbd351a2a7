"""A member of the `peers` benchmark: a process whose local steps take time, but no core of this machine."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from edgeasync.core.peer.effects import PeerReport
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import Peers
from edgeasync.parameters import Parameter, ParameterSpec, Vector
from edgeasync.protocol.peer_messages import Topology
from edgeasync.protocol.wire import Buffer
from edgeasync.runtime.peer import PeerMember, PeerModel, PeerRuntime
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.trainer import StepResult

Result = TypeVar("Result")


@dataclass(frozen=True)
class Member:
    """What a process is to be: one of `peers`, which listens at `bind` and is reached at its entry's address."""

    number: int
    peers: Peers
    secret: bytes
    bind: str
    topology: Topology
    length: int
    step_s: float
    alone_steps: int
    lease_s: float
    round_every_s: float


@dataclass(frozen=True)
class Noted:
    """What a member measured: mean seconds of a step before it had peers, and then steps, seconds and rounds."""

    step_alone_s: float
    steps: int
    seconds: float
    rounds: int
    round_s: float
    standstill_s: float
    bytes_up: int
    payload_bytes_up: int
    model: Vector


class Waits:
    """A trainer whose steps wait, as if another device computed them, and leave the model as it is."""

    def __init__(self, spec: ParameterSpec, step_s: float) -> None:
        self.spec = spec
        self._step_s = step_s

    def begin(self, parameters: Vector) -> None:
        """Train nothing."""

    def step(self) -> StepResult:
        """Wait."""
        time.sleep(self._step_s)
        return StepResult(loss=None, examples=1)


class Timed(PeerRuntime):
    """A peer that counts bytes of coded models, and seconds of its rounds and in which training stood still."""

    payload_bytes_up = 0
    round_s = standstill_s = round_began_s = 0.0

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> None:
        """Count the bytes."""
        self.payload_bytes_up += len(payload or b"")
        super().send(peer, header, payload)

    def between_steps(self, work: Callable[[Vector], Result], then: Callable[[Result], None]) -> None:
        """Count the seconds in which training stands still."""

        def timed(parameters: Vector) -> Result:
            began_s = time.monotonic()
            result = work(parameters)
            self.standstill_s += time.monotonic() - began_s
            return result

        super().between_steps(timed, then)

    def report(self, report: PeerReport) -> None:
        """Count the seconds of whole rounds."""
        if report.event == "round_started":
            self.round_began_s = time.monotonic()
        elif report.event == "round_done":
            self.round_s += time.monotonic() - self.round_began_s
        super().report(report)


def first_values(number: int, length: int) -> Vector:
    """Return the values that a member begins with."""
    return np.random.default_rng(number).normal(size=length).astype(np.float32)


def run_member(member: Member, pipe: "Connection[Any, Any]") -> None:
    """Take steps alone, then be a peer until the parent speaks; tell it of rounds, and last what was noted."""
    trainer = Waits(ParameterSpec((Parameter("weight", (member.length,)),)), member.step_s)
    own = member.peers.peer[member.number]

    def tell(report: PeerReport) -> None:
        if report.event in ("round_started", "round_done"):
            names = report.detail.partition(": ")[2].split(", ")
            pipe.send((report.event, time.monotonic(), len(names), peer.bytes_up, peer.payload_bytes_up))

    peer = Timed(
        PeerMember(own, KeyPair.of(member.secret), member.peers, 1),
        PeerSection(
            topology=member.topology, lease_s=member.lease_s, round_every_s=member.round_every_s, bind=member.bind
        ),
        PeerModel(trainer, first_values(member.number, member.length)),
        on_report=tell,
    )
    pipe.send("ready")
    pipe.recv()
    began_s = time.monotonic()
    for _ in range(member.alone_steps):
        trainer.step()
    step_alone_s = (time.monotonic() - began_s) / member.alone_steps

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def wait_for_parent() -> None:
            with contextlib.suppress(EOFError):
                pipe.recv()
            loop.call_soon_threadsafe(peer.request_stop)

        threading.Thread(target=wait_for_parent, daemon=True).start()
        await peer.run()

    began_s = time.monotonic()
    asyncio.run(run())
    pipe.send(
        Noted(
            step_alone_s,
            peer.steps_total,
            time.monotonic() - began_s,
            peer.rounds,
            peer.round_s,
            peer.standstill_s,
            peer.bytes_up,
            peer.payload_bytes_up,
            peer.parameters,
        )
    )
