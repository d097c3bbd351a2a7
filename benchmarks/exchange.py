"""How many updates per second our hub exchanges, against two blocking baselines, in turns in one run.

Run as `python -m benchmarks.exchange`. Every case has three servers, each a process of its own, and the same
client processes for all of them; a round gives each server its turn, one after the other, while the others
sleep. A ratio is the median over rounds of ours over the baseline's, from the same round.
"""

import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Self

from benchmarks.children import Child, Children
from benchmarks.exchange_clients import Counted, Round, Window, run_clients
from benchmarks.exchange_parts import measure_parts
from benchmarks.exchange_servers import SERVERS, Serve
from benchmarks.processes import cpu_seconds
from benchmarks.report import Form, Results, make_parser, show_progress, show_results

START_S = 30.0
"""How long a process may take to be ready."""


@dataclass(frozen=True)
class Case:
    """A size of model and a number of clients, spread evenly over processes; and what ours should reach.

    The targets are ratios to the two baselines. `cpu_us_max` is the most that an update may cost the hub.
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
        """Return the case with the window of a form."""
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
    """How long to measure: turns of each server, and seconds for each part by itself."""

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
    """The processes of one case: some servers, and the clients that speak with each in turn.

    Each server has its run in a folder of its name in `folder`.
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
        """Sleep through the window; return the processor seconds of the server and of all clients in it."""
        pids = [[server.pid], [client.process.pid for client in self._clients]]
        used = []
        for moment_s in (window.begin_s, window.end_s):
            time.sleep(max(0.0, moment_s - time.monotonic()))
            used.append([sum(cpu_seconds(pid) for pid in group) for group in pids])
        return used[1][0] - used[0][0], used[1][1] - used[0][1]


def run_case(case: Case, results: Results, rounds: int) -> None:
    """Measure one case and add what was found."""
    measured: dict[str, list[Measured]] = {name: [] for name in SERVERS}
    with tempfile.TemporaryDirectory() as folder, Bench(case, folder) as bench:
        for number in range(rounds):
            show_progress(f"{case.name}: round {number + 1} of {rounds}")
            for name in SERVERS:
                measured[name].append(bench.measure(name, 0.25 * case.window_s, case.window_s))
    for baseline, target in (("fair", case.target_fair), ("bare", case.target_bare)):
        ratio_name = f"{case.name} {baseline}"
        results.ratios[ratio_name] = round(paired_ratio(measured["ours"], measured[baseline]), 3)
        if target is not None:
            results.targets[ratio_name] = target
    if case.cpu_us_max is not None:
        spent_us = median(turn.server_cpu_us for turn in measured["ours"])
        results.bound(f"{case.name} hub CPU an update, us", spent_us, case.cpu_us_max)
    for name, turns in measured.items():
        results.add("updates per second", case.name, {name: median(turn.updates_per_s for turn in turns)})
        results.add("server CPU, us per update", case.name, {name: median(turn.server_cpu_us for turn in turns)})
        results.add("clients CPU, us per update", case.name, {name: median(turn.clients_cpu_us for turn in turns)})
        results.add("refused as busy", case.name, {name: sum(turn.refusals for turn in turns)})


def paired_ratio(ours: list[Measured], baseline: list[Measured]) -> float:
    """Return the median of the rounds' own ratios."""
    return statistics.median(
        mine.updates_per_s / theirs.updates_per_s for mine, theirs in zip(ours, baseline, strict=True)
    )


def median(values: Iterable[float]) -> float:
    """Return the median with the digits that mean something."""
    return round(statistics.median(values), 2)


def main() -> None:
    """Run all cases, or those whose name begins with `--case`."""
    parser = make_parser("Updates per second of the hub against blocking baselines.")
    parser.add_argument("--case", default="", help="only cases whose name begins so, such as '10 MB'")
    parser.add_argument("--rounds", type=int, help="turns of each server, 11 if left out, 3 with --short")
    arguments = parser.parse_args()
    effort = EFFORTS[arguments.form]
    results = Results()
    for case in TINY_CASES if arguments.form == Form.QUICK else CASES:
        if case.name.startswith(arguments.case):
            run_case(case.in_form(arguments.form), results, arguments.rounds or effort.rounds)
            show_progress(f"{case.name}: the parts by themselves")
            parts = measure_parts(case.length, case.clients, effort.part_s)
            for part, microseconds in parts.items():
                results.add("parts in isolation, us per update", part, {case.name: round(microseconds, 2)})
    show_results(results, arguments)


if __name__ == "__main__":
    main()
