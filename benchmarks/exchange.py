"""Measure how many updates per second the hub exchanges, against two blocking baselines.

Run as `python -m benchmarks.exchange`. Every case has three servers, each in its own process, and
the same client processes for all of them. In each round every server has its turn while the others
sleep. A ratio is the median over rounds of our rate divided by the baseline's in the same round.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Self

import numpy as np

from benchmarks.exchange_clients import Counted, Round, Window, run_clients
from benchmarks.exchange_servers import LINEAGE, SERVERS, Serve, make_assignment
from benchmarks.hub_process import POLICY, make_spec
from benchmarks.processes import Child, Children, cpu_seconds
from benchmarks.report import Form, Results, benchmark, make_parser, show_progress
from edgeasync.core.arrays.combine import norm_of
from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.hub.effects import Fold
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import VectorSource, make_codec
from edgeasync.protocol.messages import Ack, Applied, ModelVersion, Push

START_S = 30.0
"""How long a process may take until it is ready."""


@dataclass(frozen=True)
class Case:
    """A model size, a number of clients on some processes, and our targets.

    The targets are ratios to the two baselines. `cpu_us_max` bounds the hub's processor time per
    update.
    """

    name: str
    length: int
    clients: int
    processes: int
    window_s: float
    window_short_s: float = 0.0
    target_fair: float | None = None
    target_bare: float | None = None
    cpu_us_max: float | None = None

    def in_form(self, form: Form) -> Self:
        """Return the case with the window of this form."""
        return replace(self, window_s=self.window_short_s) if form == Form.SHORT else self


CASES = (
    Case("4 KB x 16", 1_000, 16, 16, 1.0, 0.5, 0.85, 0.40, cpu_us_max=90.0),
    Case("1 MB x 4", 250_000, 4, 4, 1.0, 0.5, 0.95, 0.55),
    Case("10 MB x 4", 2_500_000, 4, 4, 1.5, 0.8, 1.0, 0.55),
    Case("100 MB x 2", 25_000_000, 2, 2, 3.0, 1.5, 0.80),
)
TINY_CASES = (Case("4 KB x 2", 1_000, 2, 2, 0.3), Case("4 MB x 1", 1_000_000, 1, 1, 0.3))
"""A model in one frame, and one in pieces."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: turns of each server, and seconds for each isolated part."""

    rounds: int
    part_s: float


EFFORTS = {Form.FULL: Effort(11, 0.5), Form.SHORT: Effort(3, 0.1), Form.QUICK: Effort(1, 0.001)}


@dataclass(frozen=True)
class Measured:
    """One server's turn in a round."""

    updates_per_s: float
    server_cpu_us: float
    clients_cpu_us: float
    refusals: int


class Bench(Children):
    """The processes of one case: some servers, and clients that talk to each server in turn.

    Each server has its run in `folder`, in a folder with its name.
    """

    def __init__(self, case: Case, folder: str, servers: Mapping[str, Serve] = SERVERS) -> None:
        self._case = case
        self.folder = folder
        self._serve = servers
        super().__init__("benchmarks.exchange_clients", "benchmarks.exchange_servers")
        self.addresses: dict[str, str] = {}
        self.servers: dict[str, BaseProcess] = {}
        self._clients: list[Child] = []
        self._rounds = 0

    def __enter__(self) -> Self:
        for name, serve in self._serve.items():
            server = self.start(serve, self._case.length, f"{self.folder}/{name}")
            self.servers[name], self.addresses[name] = server.process, server.hear(START_S)
        self._clients = [self.start(run_clients, self._case.length) for _ in range(self._case.processes)]
        return self

    def measure(self, server: str, warm_up_s: float, window_s: float) -> Measured:
        """Give a server its turn."""
        self._rounds += 1
        case = self._case
        each = case.clients // case.processes
        for number, process in enumerate(self._clients):
            names = tuple(f"{self._rounds}-{number}-{client}" for client in range(each))
            process.pipe.send(Round(self.addresses[server], names))
        for client in self._clients:
            client.hear(START_S)
        begin_s = time.monotonic() + warm_up_s
        window = Window(begin_s, begin_s + window_s)
        for client in self._clients:
            client.pipe.send(window)
        server_s, clients_s = self._cpu_in(window, self.servers[server])
        counted: list[Counted] = [client.hear(START_S) for client in self._clients]
        updates = max(1, sum(item.updates for item in counted))
        return Measured(
            sum(item.updates_per_s for item in counted),
            1e6 * server_s / updates,
            1e6 * clients_s / updates,
            sum(item.refusals for item in counted),
        )

    def _cpu_in(self, window: Window, server: BaseProcess) -> tuple[float, float]:
        """Sleep through the window; return the processor seconds of the server and of all clients."""
        pids = [[server.pid], [client.process.pid for client in self._clients]]
        used = []
        for moment_s in (window.begin_s, window.end_s):
            time.sleep(max(0.0, moment_s - time.monotonic()))
            used.append([sum(cpu_seconds(pid) for pid in group) for group in pids])
        return used[1][0] - used[0][0], used[1][1] - used[0][1]


def run_case(case: Case, results: Results, rounds: int) -> None:
    """Measure one case and add its figures."""
    measured: dict[str, list[Measured]] = {name: [] for name in SERVERS}
    with tempfile.TemporaryDirectory() as folder, Bench(case, folder) as bench:
        for number in range(rounds):
            show_progress(f"{case.name}: round {number + 1} of {rounds}")
            for name in SERVERS:
                measured[name].append(bench.measure(name, 0.25 * case.window_s, case.window_s))
    for baseline, target in (("fair", case.target_fair), ("bare", case.target_bare)):
        results.ratio(f"{case.name} {baseline}", paired_ratio(measured["ours"], measured[baseline]), target)
    if case.cpu_us_max is not None:
        spent_us = median(turn.server_cpu_us for turn in measured["ours"])
        results.bound(f"{case.name} hub CPU an update, us", spent_us, case.cpu_us_max)
    for name, turns in measured.items():
        results.add("updates per second", case.name, {name: median(turn.updates_per_s for turn in turns)})
        results.add("server CPU, us per update", case.name, {name: median(turn.server_cpu_us for turn in turns)})
        results.add("clients CPU, us per update", case.name, {name: median(turn.clients_cpu_us for turn in turns)})
        results.add("refused as busy", case.name, {name: sum(turn.refusals for turn in turns)})


def paired_ratio(ours: list[Measured], baseline: list[Measured]) -> float:
    """Return the median of the ratios of each round."""
    return statistics.median(
        mine.updates_per_s / theirs.updates_per_s for mine, theirs in zip(ours, baseline, strict=True)
    )


def median(values: Iterable[float]) -> float:
    """Return the median, rounded to significant digits."""
    return round(statistics.median(values), 2)


BATCHES = 7


def measure_parts(length: int, seconds: float) -> dict[str, float]:
    """Time every part with a model of `length` values, about `seconds` for each."""
    spec, policy = make_spec(length), POLICY
    rng = np.random.default_rng(2)
    codec = make_codec("identity", spec)
    payload = codec.encode(VectorSource(rng.normal(0.0, 1e-3, length).astype(np.float32)))
    base, checksum = ModelVersion(LINEAGE, 0), wire.checksum(payload)
    push = Push(bytes(16), 1, base, 16, 512, 1.0, 0.1, 0.01, "identity", checksum, len(payload))
    push_header = wire.encode(push)
    update = codec.open(payload)
    model = HubModel(spec, np.zeros(length, np.float32), 0, policy)
    plan = plan_chain(policy.optimizer, Conditions(1.0, 0))
    snapshot = model.current
    assignment = make_assignment(snapshot, 2**63, len(payload), 0, Ack(1, Applied(1)))
    coded = snapshot.payload(codec)[0]

    def fold() -> None:
        model.advance(model.fold(Fold(model.current.number + 1, (0,), (0.5,), plan), [update])[0])

    return {
        "header decode": _time(lambda: wire.decode(push_header), seconds),
        "header encode": _time(lambda: wire.encode(assignment), seconds),
        "checksum": _time(lambda: wire.checksum(payload), seconds),
        "norm": _time(lambda: norm_of(update), seconds),
        "fold": _time(fold, seconds),
        "snapshot checksum": _time(lambda: wire.checksum(coded), seconds),
    }


def _time(work: Callable[[], object], seconds: float) -> float:
    """Return microseconds per call, as the median of batches of about `seconds` in total."""
    work()
    start = time.perf_counter()
    work()
    count = max(1, int(seconds / BATCHES / max(time.perf_counter() - start, 1e-7)))
    batches = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in itertools.repeat(None, count):
            work()
        batches.append((time.perf_counter() - start) / count)
    return 1e6 * statistics.median(batches)


PARSER = make_parser("Updates per second of the hub against blocking baselines.")
PARSER.add_argument("--case", default="", help="run only cases whose name starts with this, such as '10 MB'")
PARSER.add_argument("--rounds", type=int, help="turns of each server [default: 11, with --short 3]")


@benchmark(PARSER)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Run all cases, or those whose name starts with `--case`."""
    effort = EFFORTS[arguments.form]
    for case in TINY_CASES if arguments.form == Form.QUICK else CASES:
        if case.name.startswith(arguments.case):
            run_case(case.in_form(arguments.form), results, arguments.rounds or effort.rounds)
            show_progress(f"{case.name}: isolated parts")
            parts = measure_parts(case.length, effort.part_s)
            for part, microseconds in parts.items():
                results.add("parts in isolation, us per update", part, {case.name: microseconds})


if __name__ == "__main__":
    main()
