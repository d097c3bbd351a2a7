"""Measure averaging without a hub: hidden time, traffic, a killed member and accuracy.

Run as `python -m benchmarks.peers`. Members are real processes. In front of each is a TCP proxy in
user space that limits its downlink to 50 Mbit/s. Local steps take 20 ms without using a core.
"""

import argparse
import asyncio
import contextlib
import itertools
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np

from benchmarks.agent_process import Waits
from benchmarks.hub_process import make_spec
from benchmarks.link_proxy import Proxy
from benchmarks.processes import Child, Children
from benchmarks.report import Form, Results, benchmark, show_progress
from benchmarks.virtual_fleet import split_digits
from edgeasync import SGD, Stop, train
from edgeasync.core.peer.effects import PeerReport
from edgeasync.data.partition import iid
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, Peers
from edgeasync.parameters import Vector
from edgeasync.protocol.peer_messages import Topology
from edgeasync.protocol.wire import Buffer
from edgeasync.runtime.peer import PeerMember, PeerModel, PeerRuntime
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.numpy_models import MlpModel

Result = TypeVar("Result")

MBIT_50 = 50e6 / 8
STEP_S = 0.02
LENGTH = 250_000
"""Values of the model: 1 MB."""


class Told(NamedTuple):
    """The end of a round: when, with how many members, and the bytes sent until then."""

    at_s: float
    members: int
    sent: int
    payload: int


@dataclass(frozen=True)
class Noted:
    """A member's measurements: mean step time before it has peers, then steps, seconds, rounds."""

    step_alone_s: float
    steps: int
    seconds: float
    rounds: int
    round_s: float
    standstill_s: float
    model: Vector


class Timed(PeerRuntime):
    """A peer that measures coded bytes, seconds in rounds, and seconds without steps."""

    payload_bytes_up = 0
    round_s = standstill_s = round_began_s = 0.0

    def send(self, peer: str, header: bytes, payload: Buffer | None) -> None:
        """Count the bytes."""
        self.payload_bytes_up += len(payload or b"")
        super().send(peer, header, payload)

    def between_steps(self, work: Callable[[Vector], Result], then: Callable[[Result], None]) -> None:
        """Measure the seconds in which training waits."""

        def timed(parameters: Vector) -> Result:
            began_s = time.monotonic()
            result = work(parameters)
            self.standstill_s += time.monotonic() - began_s
            return result

        super().between_steps(timed, then)

    def report(self, report: PeerReport) -> None:
        """Measure the seconds of whole rounds."""
        if report.event == "round_started":
            self.round_began_s = time.monotonic()
        elif report.event == "round_done":
            self.round_s += time.monotonic() - self.round_began_s
        super().report(report)


def first_values(number: int) -> Vector:
    """Return a member's initial values."""
    return np.random.default_rng(number).normal(size=LENGTH).astype(np.float32)


def run_member(
    number: int, peers: Peers, secret: bytes, section: PeerSection, pipe: "Connection[Any, Any]"
) -> None:
    """Take steps alone, then be a peer until the parent sends something.

    It reports each round, and at the end its measurements.
    """
    trainer = Waits(make_spec(LENGTH), STEP_S)

    def tell(report: PeerReport) -> None:
        if report.event == "round_done":
            names = report.detail.partition(": ")[2].split(", ")
            pipe.send(Told(time.monotonic(), len(names), peer.bytes_up, peer.payload_bytes_up))

    peer = Timed(
        PeerMember(peers.peer[number], KeyPair.of(secret), peers, 1),
        section,
        PeerModel(trainer, first_values(number)),
        on_report=tell,
    )
    pipe.send("ready")
    alone_steps = pipe.recv()
    began_s = time.monotonic()
    for _ in range(alone_steps):
        trainer.step()
    step_alone_s = (time.monotonic() - began_s) / alone_steps

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
            peer.parameters,
        )
    )


LEASE_S = 3.0
ROUND_EVERY_S = 0.3
PATIENCE_S = 120.0
HIDDEN_MIN = 0.9
POINTS_MAX = 0.01
TOPOLOGIES: tuple[Topology, ...] = ("ring", "all_to_all")


@dataclass(frozen=True)
class Effort:
    """How much to measure: members and rounds on slow links, learning members and epochs."""

    members: int
    rounds: int
    alone_steps: int
    learners: int
    epochs: int


EFFORTS = {
    Form.FULL: Effort(4, 40, 500, 8, 100),
    Form.SHORT: Effort(4, 12, 200, 8, 100),
    Form.QUICK: Effort(2, 2, 10, 2, 2),
}


class Fleet(Children):
    """Members in processes, each behind its own proxy, and their reports of rounds."""

    def __init__(self, effort: Effort, topology: Topology, count: int) -> None:
        super().__init__("benchmarks.peers")
        self._effort, self._topology = effort, topology
        self._proxies = [Proxy(MBIT_50) for _ in range(count)]
        self.members: list[Child] = []
        self.rounds: list[list[Told]] = [[] for _ in range(count)]

    async def __aenter__(self) -> Self:
        pairs = [KeyPair.make() for _ in self._proxies]
        binds = [f"tcp://127.0.0.1:{20_000 + secrets.randbelow(12_000)}" for _ in pairs]
        for proxy, bind in zip(self._proxies, binds, strict=True):
            await proxy.start(bind)
        entries = tuple([
            PeerEntry(name=f"member-{number}", address=proxy.address, key=pair.public.hex())
            for number, (proxy, pair) in enumerate(zip(self._proxies, pairs, strict=True))
        ])  # fmt: skip
        for number, (pair, bind) in enumerate(zip(pairs, binds, strict=True)):
            section = PeerSection(topology=self._topology, lease_s=LEASE_S, round_every_s=ROUND_EVERY_S, bind=bind)
            self.members.append(self.start(run_member, number, Peers(peer=entries), pair.secret, section))
        for member in self.members:
            await asyncio.to_thread(member.hear)
        for member in self.members:
            member.pipe.send(self._effort.alone_steps)
        return self

    async def __aexit__(self, *_: object) -> None:
        super().__exit__()
        for proxy in self._proxies:
            await proxy.stop()

    async def wait_for_rounds(self, member: int, count: int, members: int, since_s: float = 0.0) -> float:
        """Wait until a member has `count` rounds of `members` that ended later; return when."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            for each, told in zip(self.members, self.rounds, strict=True):
                while each.process.is_alive() and each.pipe.poll():
                    told.append(each.pipe.recv())
            found = [one.at_s for one in self.rounds[member] if one.members == members and one.at_s > since_s]
            if len(found) >= count:
                return found[count - 1]
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"member {member} has {len(found)} rounds of {members}, not {count}")
            await asyncio.sleep(0.02)

    async def end(self, members: list[int]) -> list[Noted]:
        """Stop these members; return their measurements."""
        for member in members:
            self.members[member].pipe.send("end")
        return [await asyncio.to_thread(self._noted, self.members[member]) for member in members]

    @staticmethod
    def _noted(member: Child) -> Noted:
        while not isinstance(said := member.hear(PATIENCE_S), Noted):
            pass
        return said


async def measure_rounds(effort: Effort, topology: Topology, results: Results) -> None:
    """Average a 1 MB model at 50 Mbit/s; compare time and bytes with their bounds."""
    count, numbers = effort.members, list(range(effort.members))
    show_progress(f"{topology}: {count} members, 1 MB, 50 Mbit/s, {effort.rounds} rounds")
    async with Fleet(effort, topology, count) as fleet:
        first_s = await fleet.wait_for_rounds(0, 1, count)
        for number in numbers:
            await fleet.wait_for_rounds(number, effort.rounds, count, first_s)
        told = fleet.rounds[:]
        noted = await fleet.end(numbers)
    hidden = [_hidden(each) for each in noted]
    sent = [_bytes_of_round(rounds, count) for rounds in told]
    theory = 4 * LENGTH * (2 * (count - 1) / count if topology == "ring" else count - 1)
    mean = np.mean([first_values(number) for number in numbers], axis=0, dtype=np.float64)
    title = f"{topology}, {count} members, a model of 1 MB at 50 Mbit/s, steps of 20 ms"
    found = {
        "rounds": median(each.rounds for each in noted),
        "a round, s": median(each.round_s / each.rounds for each in noted),
        "share of the time in rounds": median(each.round_s / each.seconds for each in noted),
        "a step alone, ms": 1e3 * median(each.step_alone_s for each in noted),
        "a step with rounds, ms": 1e3 * median(each.seconds / each.steps for each in noted),
        "share of the rounds' time that is hidden": median(hidden),
        "steps stood still, share of the rounds' time": median(each.standstill_s / each.round_s for each in noted),
        "payload sent a round, MB": median(payload for _, payload in sent) / 1e6,
        "all sent a round, MB": median(total for total, _ in sent) / 1e6,
        "theory, MB": theory / 1e6,
        "largest difference from the mean, 1e-6": 1e6
        * max(float(np.abs(each.model - mean).max()) for each in noted),
    }
    for name, value in found.items():
        results.add(title, name, {"": value}, 4)
    results.ratio(f"{topology}: hidden over 0.9", median(hidden) / HIDDEN_MIN, 1.0)
    results.ratio(f"{topology}: theory over all bytes sent", theory / median(total for total, _ in sent), 0.95)
    results.bound(f"{topology}: difference from the mean", found["largest difference from the mean, 1e-6"], 1.0)


def _hidden(noted: Noted) -> float:
    """Return the share of the time in rounds in which steps ran at their usual speed."""
    lost_s = max(0.0, noted.seconds - noted.steps * noted.step_alone_s)
    return 1.0 - lost_s / noted.round_s


def _bytes_of_round(rounds: list[Told], count: int) -> tuple[float, float]:
    """Return the medians of a member's bytes per whole round: all, and payload."""
    pairs = list(itertools.pairwise(one for one in rounds if one.members == count))
    total = median(after.sent - before.sent for before, after in pairs)
    return float(total), float(median(after.payload - before.payload for before, after in pairs))


async def measure_death(effort: Effort, topology: Topology, results: Results) -> None:
    """Kill a member in mid-round; compare the others' next round with the lease."""
    count = max(3, effort.members)
    show_progress(f"{topology}: one of {count} members is killed")
    async with Fleet(effort, topology, count) as fleet:
        first_s = await fleet.wait_for_rounds(0, 1, count)
        second_s = await fleet.wait_for_rounds(0, 2, count)
        await asyncio.sleep(ROUND_EVERY_S + (second_s - first_s - ROUND_EVERY_S) / 2)
        fleet.members[1].kill()
        killed_s = time.monotonic()
        others = [number for number in range(count) if number != 1]
        ends = [await fleet.wait_for_rounds(number, 1, count - 1, killed_s) for number in others]
        await fleet.end(others)
    round_s = second_s - first_s
    title = f"{topology}, one of {count} members is killed"
    results.add(title, "next mean of the others after, s", {"": max(ends) - killed_s})
    results.add(title, "lease and a round, s", {"": LEASE_S + round_s})
    results.bound(f"{topology}: next mean after a death", max(ends) - killed_s, LEASE_S + round_s)


def measure_learning(effort: Effort, results: Results) -> None:
    """Learn the digits with a hub and without one, in processes with equal shares."""
    training, held_out = split_digits()
    parts = list(iid(training, effort.learners, 0))
    title = f"digits, {effort.learners} processes, {effort.epochs} epochs"
    found: dict[str, float] = {}
    ways: tuple[Literal["star"] | Topology, ...] = ("star", *TOPOLOGIES)
    for topology in ways:
        show_progress(f"{title}: {topology}")
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            run = train(
                MlpModel(inputs=64, hidden=(32,), classes=10),
                parts,
                run=Path(folder) / "run",
                until=Stop(epochs=effort.epochs),
                evaluate=held_out,
                optimizer=SGD(learning_rate=0.5),
                engine="processes",
                topology=topology,
            )
        assert run.accuracy is not None
        found[topology] = run.accuracy
        columns = {"accuracy": run.accuracy, "loss": run.loss or 0.0, "seconds": time.monotonic() - began_s}
        results.add(title, topology, columns, 4)
    for topology in TOPOLOGIES:
        name = f"{topology}: accuracy plus 1 point over the star's"
        results.ratio(name, (found[topology] + POINTS_MAX) / found["star"], 1.0)


@benchmark("Averaging without a hub.")
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Measure rounds on slow links, a killed member, and learning."""
    effort = EFFORTS[arguments.form]
    for topology in TOPOLOGIES:
        asyncio.run(measure_rounds(effort, topology, results))
        if arguments.form != Form.QUICK or topology == "ring":
            asyncio.run(measure_death(effort, topology, results))
    measure_learning(effort, results)


if __name__ == "__main__":
    main()
