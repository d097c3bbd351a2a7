"""The cost of durability: the hub's rates, its starts, and checkpoints of a large model.

Run as `python -m benchmarks.durability`. Two real hubs take turns in every round, with the same clients: the one
with a journal, and the one without, as in the exchange benchmark. Between them the time of the disk alone for the
same bytes is measured.
"""

import itertools
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import Child
from benchmarks.durability_processes import (
    ALWAYS_SAVING,
    NEVER_RECOVERED,
    WITH_JOURNAL,
    WITHOUT_JOURNAL,
    open_run,
    write_and_sync_s,
)  # fmt: skip
from benchmarks.exchange import START_S, Bench, Case, Measured, median, paired_ratio
from benchmarks.exchange_servers import Serve
from benchmarks.processes import peak_resident_bytes
from benchmarks.report import Form, Results, make_parser, show_progress, show_results
from edgeasync.durable.checkpoint import CheckpointStore
from edgeasync.durable.disk import FolderDisk
from edgeasync.net.status import fetch_status

CASES = (
    Case("4 KB x 16", 1_000, 16, 16, 2.0, 1.0),
    Case("1 MB x 4", 250_000, 4, 4, 2.0, 1.0),
    Case("100 MB x 2", 25_000_000, 2, 2, 8.0, 4.0),
)
TINY_CASES = (Case("4 KB x 2", 1_000, 2, 2, 0.4), Case("1.2 MB x 1", 300_000, 1, 1, 0.5))
"""One whose journal is recovered, and one of which checkpoints are written."""

TARGETS = {CASES[0].name: 0.5}
ROUNDS = {Form.FULL: 7, Form.SHORT: 3, Form.QUICK: 1}

RECOVERED_BYTES_MAX = 1 << 20
"""The largest model whose journal is recovered: that of a larger one would fill the disk."""

RECOVER_S = 300.0


@dataclass(frozen=True)
class Journaled:
    """A journal's growth during one turn, and how long the disk alone takes for its mean sync."""

    updates: int
    entries: int
    nbytes: int
    syncs: int
    disk_s: float

    @property
    def disk_updates_per_s(self) -> float:
        """The rate of a hub that only wrote its updates down, with as many updates in a sync."""
        return self.updates / (self.syncs * self.disk_s)


def run_rates(case: Case, results: Results, folder: str, rounds: int) -> None:
    """Compare the rates with a journal and without; add what the journal wrote."""
    servers = {"journal": WITH_JOURNAL, "no journal": WITHOUT_JOURNAL}
    measured: dict[str, list[Measured]] = {name: [] for name in servers}
    window_s = case.window_s
    journaled = []
    with _bench(case, folder, servers) as bench:
        for number in range(rounds):
            show_progress(f"rates, {case.name}: round {number + 1} of {rounds}")
            before = fetch_status(bench.addresses["journal"], START_S)
            measured["journal"].append(bench.measure("journal", 0.25 * window_s, window_s))
            after = fetch_status(bench.addresses["journal"], START_S)
            measured["no journal"].append(bench.measure("no journal", 0.25 * window_s, window_s))
            journaled.append(_between(before, after, folder, 0.25 * window_s))
        peaks = {name: round(peak_resident_bytes(process.pid) / 1e6) for name, process in bench.servers.items()}
    ratio_name = f"{case.name} journal / no journal"
    results.ratios[ratio_name] = round(paired_ratio(measured["journal"], measured["no journal"]), 3)
    if case.name in TARGETS:
        results.targets[ratio_name] = TARGETS[case.name]
    disk = {"disk alone": median(turn.disk_updates_per_s for turn in journaled)}
    for name, turns in measured.items():
        results.add("updates per second", case.name, {name: median(turn.updates_per_s for turn in turns)})
        results.add("server CPU, us per update", case.name, {name: median(turn.server_cpu_us for turn in turns)})
        results.add("refused as busy", case.name, {name: sum(turn.refusals for turn in turns)})
    results.add("updates per second", case.name, disk)
    results.add("server's memory at most, MB", case.name, peaks)
    written = {
        "bytes per update": median(turn.nbytes / turn.updates for turn in journaled),
        "entries per update": median(turn.entries / turn.updates for turn in journaled),
        "syncs per update": median(turn.syncs / turn.updates for turn in journaled),
        "ms for such a sync alone": median(1e3 * turn.disk_s for turn in journaled),
    }
    results.add("written down", case.name, written)


def run_starts(case: Case, results: Results, folder: str, rounds: int) -> None:
    """Kill a hub that has received updates, and time how long the next start takes to recover all of them."""
    context = multiprocessing.get_context("forkserver")
    show_progress(f"recovery, {case.name}: making a journal")
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        with Bench(case, runs, {"hub": NEVER_RECOVERED}) as bench:
            rate = bench.measure("hub", 0.0, case.window_s).updates_per_s
        found: list[tuple[float, int, int]] = []
        for number in range(rounds):
            show_progress(f"recovery, {case.name}: round {number + 1} of {rounds}")
            child = Child(context, open_run, case.length, f"{runs}/hub")
            found.append(child.hear(RECOVER_S))
            child.process.join()
    _, updates, entries = found[0]
    taken_s = statistics.median(seconds for seconds, _, _ in found)
    results.ratios[f"{case.name} recovered / exchanged"] = round(updates / taken_s / rate, 3)
    per_thousand_s = round(1e3 * taken_s / updates, 4)
    results.add("recovery", case.name, {"updates": updates, "entries": entries, "s per 1,000": per_thousand_s})


def run_saves(case: Case, results: Results, folder: str, rounds: int) -> None:
    """Compare the rates with one checkpoint after the other and without checkpoints; there is no journal."""
    servers = {"saving": ALWAYS_SAVING, "not saving": WITHOUT_JOURNAL}
    measured: dict[str, list[Measured]] = {name: [] for name in servers}
    window_s = case.window_s
    taken_s = []
    with _bench(case, folder, servers) as bench:
        for number in range(rounds):
            show_progress(f"checkpoints, {case.name}: round {number + 1} of {rounds}")
            for name in servers:
                measured[name].append(bench.measure(name, 0.25 * window_s, window_s))
            taken_s.append(_save_s(f"{bench.folder}/saving"))
    results.ratios[f"{case.name} saving / not"] = round(
        paired_ratio(measured["saving"], measured["not saving"]), 3
    )
    rates = {name: median(turn.updates_per_s for turn in turns) for name, turns in measured.items()}
    results.add("updates per second", f"{case.name}, no journal", rates)
    results.add("checkpoint", case.name, {"s from one to the next": median(taken_s)})


@contextmanager
def _bench(case: Case, folder: str, servers: Mapping[str, Serve]) -> Iterator[Bench]:
    """Yield the processes of a case, whose runs lie in a folder of their own in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as runs, Bench(case, runs, servers) as bench:
        yield bench


def _between(before: dict[str, Any], after: dict[str, Any], folder: str, seconds: float) -> Journaled:
    """Return what was appended to a journal between two statuses; let the disk alone do the same for a while."""
    entries, nbytes, syncs = (
        after["journal"][key] - before["journal"][key] for key in ("entries", "bytes", "syncs")
    )
    updates = after["updates_applied"] - before["updates_applied"]
    return Journaled(updates, entries, nbytes, syncs, write_and_sync_s(folder, nbytes // syncs, seconds))


def _save_s(run: str) -> float:
    """Return how long a checkpoint takes: the next one begins as soon as it is written."""
    begun_s = [manifest.created_s for _, manifest in CheckpointStore(FolderDisk(Path(run)), 3).manifests()[0]]
    return min(later - earlier for later, earlier in itertools.pairwise(begun_s))  # one may hold a pause


def main() -> None:
    """Run all cases, or those whose name begins with `--case`."""
    parser = make_parser("What the journal and the checkpoints cost the hub.")
    parser.add_argument("--case", default="", help="only cases whose name begins so, such as '1 MB'")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk to be measured")
    parser.add_argument("--rounds", type=int, help="turns of each server, 7 if left out, 3 with --short")
    arguments = parser.parse_args()
    rounds, folder = arguments.rounds or ROUNDS[arguments.form], arguments.folder
    results = Results()
    for case in TINY_CASES if arguments.form == Form.QUICK else CASES:
        if case.name.startswith(arguments.case):
            timed = case.in_form(arguments.form)
            run_rates(timed, results, folder, rounds)
            if 4 * case.length <= RECOVERED_BYTES_MAX:
                run_starts(timed, results, folder, rounds)
            else:
                run_saves(timed, results, folder, rounds)
    show_results(results, arguments)


if __name__ == "__main__":
    main()
