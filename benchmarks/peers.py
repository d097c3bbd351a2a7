"""Averaging without a hub: what it hides behind computing, what it sends, and what a death costs the others.

Run as `python -m benchmarks.peers`. Members are real processes. Before each is a TCP proxy in user space that lets
50 Mbit/s in. Local steps take 20 ms without a core of this machine.
"""

import asyncio
import itertools
import multiprocessing
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from benchmarks.link_proxy import Proxy
from benchmarks.peers_processes import Member, Noted, first_values, run_member
from benchmarks.report import Form, Results, enforce_targets, make_parser, show_progress, show_results
from benchmarks.simulated import split_digits
from edgeasync import SGD, Stop, train
from edgeasync.data.partition import iid
from edgeasync.durable.keys import KeyPair
from edgeasync.durable.peers_file import PeerEntry, Peers
from edgeasync.protocol.peer_messages import Topology
from edgeasync.training.numpy_models import MlpModel

MBIT_50 = 50e6 / 8
STEP_S = 0.02
LENGTH = 250_000
LEASE_S = 3.0
ROUND_EVERY_S = 0.3
PATIENCE_S = 120.0
HIDDEN_MIN = 0.9
POINTS_MAX = 0.01
TOPOLOGIES: tuple[Topology, ...] = ("ring", "all_to_all")


@dataclass(frozen=True)
class Effort:
    """How much to measure: members on slow links, the rounds that they take, and members and epochs that learn."""

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


class Fleet:
    """Member processes, and how to talk with them."""

    def __init__(self, processes: list[BaseProcess], pipes: list["Connection[Any, Any]"]) -> None:
        self.processes = processes
        self.pipes = pipes
        self.rounds: list[list[tuple[str, float, int, int, int]]] = [[] for _ in pipes]
        """What each member told of its rounds: event, when, how many members, and bytes sent by then."""

    async def wait_for_rounds(self, member: int, count: int, members: int, since_s: float = 0.0) -> float:
        """Wait until a member has this number of rounds of this number of members, ended later; return when."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            self._read()
            found = [
                when for event, when, size, *_ in self.rounds[member] if event == "round_done" and size == members
            ]
            found = [when for when in found if when > since_s]
            if len(found) >= count:
                return found[count - 1]
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"member {member} has {len(found)} rounds of {members}, not {count}")
            await asyncio.sleep(0.02)

    async def end(self, members: list[int]) -> list[Noted]:
        """End these members; return what they measured."""
        for member in members:
            self.pipes[member].send("end")
        noted: dict[int, Noted] = {}
        while len(noted) < len(members):
            for member in set(members) - noted.keys():
                while self.pipes[member].poll():
                    said = self.pipes[member].recv()
                    if isinstance(said, Noted):
                        noted[member] = said
                        break
            await asyncio.sleep(0.01)
        return [noted[member] for member in members]

    def _read(self) -> None:
        for pipe, rounds, process in zip(self.pipes, self.rounds, self.processes, strict=True):
            while process.is_alive() and pipe.poll():
                rounds.append(pipe.recv())


@asynccontextmanager
async def members(effort: Effort, topology: Topology, count: int, rate: float | None) -> AsyncIterator[Fleet]:
    """Start members, each behind a proxy of its own; end them and the proxies on leaving."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.peers_processes"])
    pairs = [KeyPair.make() for _ in range(count)]
    proxies = [Proxy(rate) for _ in range(count)]
    processes: list[BaseProcess] = []
    pipes: list[Connection[Any, Any]] = []
    try:
        binds = []
        for proxy in proxies:
            port = 20_000 + secrets.randbelow(12_000)
            await proxy.start(("127.0.0.1", port))
            binds.append(f"tcp://127.0.0.1:{port}")
        peers = Peers(
            peer=tuple([
                PeerEntry(name=f"member-{number}", address=proxy.address, key=pair.public.hex())
                for number, (proxy, pair) in enumerate(zip(proxies, pairs, strict=True))
            ])
        )  # fmt: skip
        for number, (pair, bind) in enumerate(zip(pairs, binds, strict=True)):
            ours, theirs = context.Pipe()
            member = Member(
                number,
                peers,
                pair.secret,
                bind,
                topology,
                LENGTH,
                STEP_S,
                effort.alone_steps,
                LEASE_S,
                ROUND_EVERY_S,
            )
            process: BaseProcess = context.Process(target=run_member, args=(member, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv)
        for pipe in pipes:
            pipe.send("go")
        yield Fleet(processes, pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for proxy in proxies:
            await proxy.stop()


async def measure_rounds(effort: Effort, topology: Topology, results: Results) -> None:
    """Let members exchange a model of 1 MB at 50 Mbit/s; compare time and bytes with their bounds."""
    count, numbers = effort.members, list(range(effort.members))
    show_progress(f"{topology}: {count} members, 1 MB, 50 Mbit/s, {effort.rounds} rounds")
    async with members(effort, topology, count, MBIT_50) as fleet:
        first_s = await fleet.wait_for_rounds(0, 1, count)
        for number in numbers:
            await fleet.wait_for_rounds(number, effort.rounds, count, first_s)
        told = fleet.rounds[:]
        noted = await fleet.end(numbers)
    hidden = [_hidden(each) for each in noted]
    sent = [_bytes_of_round(rounds, count) for rounds in told]
    theory = 4 * LENGTH * (2 * (count - 1) / count if topology == "ring" else count - 1)
    mean = np.mean([first_values(number, LENGTH) for number in numbers], axis=0, dtype=np.float64)
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
        results.add(title, name, {"": round(value, 4)})
    results.ratios[f"{topology}: hidden over 0.9"] = round(median(hidden) / HIDDEN_MIN, 3)
    results.targets[f"{topology}: hidden over 0.9"] = 1.0
    results.ratios[f"{topology}: theory over all bytes sent"] = round(
        theory / median(total for total, _ in sent), 3
    )
    results.targets[f"{topology}: theory over all bytes sent"] = 0.95
    results.bound(f"{topology}: difference from the mean", found["largest difference from the mean, 1e-6"], 1.0)


def _hidden(noted: Noted) -> float:
    """Return the share of the rounds' time in which steps kept the pace that they have without."""
    lost_s = max(0.0, noted.seconds - noted.steps * noted.step_alone_s)
    return 1.0 - lost_s / noted.round_s


def _bytes_of_round(rounds: list[tuple[str, float, int, int, int]], count: int) -> tuple[float, float]:
    """Return the bytes that a member sent between the ends of its whole rounds: all, and payload; the medians."""
    ends = [
        (total, payload) for event, _, size, total, payload in rounds if event == "round_done" and size == count
    ]
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(ends)]
    return float(median(total for total, _ in steps)), float(median(payload for _, payload in steps))


async def measure_death(effort: Effort, topology: Topology, results: Results) -> None:
    """Kill a member in the middle of a round; compare when the others have their next round with the lease."""
    count = max(3, effort.members)
    show_progress(f"{topology}: one of {count} members is killed")
    async with members(effort, topology, count, MBIT_50) as fleet:
        first_s = await fleet.wait_for_rounds(0, 1, count)
        second_s = await fleet.wait_for_rounds(0, 2, count)
        await asyncio.sleep(ROUND_EVERY_S + (second_s - first_s - ROUND_EVERY_S) / 2)
        fleet.processes[1].kill()
        fleet.processes[1].join()
        killed_s = time.monotonic()
        others = [number for number in range(count) if number != 1]
        ends = [await fleet.wait_for_rounds(number, 1, count - 1, killed_s) for number in others]
        await fleet.end(others)
    round_s = second_s - first_s
    results.add(
        f"{topology}, one of {count} members is killed",
        "next mean of the others after, s",
        {"": max(ends) - killed_s},
    )
    results.add(f"{topology}, one of {count} members is killed", "lease and a round, s", {"": LEASE_S + round_s})
    results.bound(f"{topology}: next mean after a death", max(ends) - killed_s, LEASE_S + round_s)


def measure_learning(effort: Effort, results: Results) -> None:
    """Learn the digits with a hub and without one, in processes, from equal shares."""
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
        results.add(title, topology, {name: round(value, 4) for name, value in columns.items()})
    for topology in TOPOLOGIES:
        name = f"{topology}: accuracy and 1 point over the star's"
        results.ratios[name] = round((found[topology] + POINTS_MAX) / found["star"], 3)
        results.targets[name] = 1.0


def main() -> None:
    """Measure rounds on slow links, a death, and learning."""
    arguments = make_parser(__doc__ or "").parse_args()
    results, effort = Results(), EFFORTS[arguments.form]
    for topology in TOPOLOGIES:
        asyncio.run(measure_rounds(effort, topology, results))
        if arguments.form != Form.QUICK or topology == "ring":
            asyncio.run(measure_death(effort, topology, results))
    measure_learning(effort, results)
    show_results(results, arguments)
    enforce_targets(results, arguments)


if __name__ == "__main__":
    main()
