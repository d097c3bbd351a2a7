"""Measure the cost of durability: journal, recovery, history and checkpoints.

Run as `python -m benchmarks.durability`. It first measures the rows of a history. Then real hubs
with the clients of the exchange benchmark take turns in every round: with a journal, with a journal
and a history, and with neither. Between them it times the disk alone with the same bytes.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.durability_history import measure_history
from benchmarks.exchange import START_S, Bench, Case, Measured, median, paired_ratio
from benchmarks.exchange_servers import LINEAGE, Serve
from benchmarks.hub_process import ADDRESS, POLICY, make_settings, make_spec, serve_hub
from benchmarks.processes import Children, peak_resident_bytes
from benchmarks.report import Form, Results, benchmark, make_parser, show_progress
from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import CheckpointSettings
from edgeasync.durable.checkpoint import CheckpointStore
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import SEGMENT_BYTES_MAX
from edgeasync.durable.recovery import Rules
from edgeasync.durable.run import HubRun
from edgeasync.net.status import fetch_status
from edgeasync.runtime.hub_settings import HubSection

CASES = (
    Case("4 KB x 16", 1_000, 16, 16, 2.0, 1.0),
    Case("1 MB x 4", 250_000, 4, 4, 2.0, 1.0),
    Case("100 MB x 2", 25_000_000, 2, 2, 8.0, 4.0),
)
TINY_CASES = (Case("4 KB x 2", 1_000, 2, 2, 0.4), Case("1.2 MB x 1", 300_000, 1, 1, 0.5))
"""A case with recovery and a case with checkpoints."""

JOURNAL_ALONE = CheckpointSettings(every="1000 hours", journal_bytes_max=ByteCount(1 << 50))
"""Checkpoints only at the start and the end."""

BACK_TO_BACK = CheckpointSettings(every="0.02 seconds")
"""Each checkpoint begins when the previous one is written."""

JOURNAL = HubSection(bind=ADDRESS, history_rows_max=0)
PROBE_FILE = "probe"

RECOVERABLE = make_settings(JOURNAL, checkpoint=JOURNAL_ALONE)
WITH_JOURNAL: Serve = partial(serve_hub, settings=make_settings(JOURNAL))
WITH_HISTORY: Serve = partial(serve_hub, settings=make_settings(HubSection(bind=ADDRESS)))
WITHOUT_JOURNAL: Serve = serve_hub
NEVER_RECOVERED: Serve = partial(serve_hub, settings=RECOVERABLE)
ALWAYS_SAVING: Serve = partial(serve_hub, settings=make_settings(checkpoint=BACK_TO_BACK))

TARGETS = {CASES[0].name: 0.5}
ROUNDS = {Form.FULL: 7, Form.SHORT: 3, Form.QUICK: 1}

RECOVERED_BYTES_MAX = 1 << 20
"""Largest model whose journal is recovered. A larger one would fill the disk."""

RECOVER_S = 300.0


@dataclass(frozen=True)
class Journaled:
    """A journal's growth during one turn, and the time of its mean sync on the disk alone."""

    updates: int
    entries: int
    nbytes: int
    syncs: int
    disk_s: float

    @property
    def disk_updates_per_s(self) -> float:
        """The rate of a hub that only writes updates, with as many updates per sync."""
        return self.updates / (self.syncs * self.disk_s)


def run_rates(case: Case, results: Results, folder: str, rounds: int) -> None:
    """Compare the rates with a journal and without; add what the journal wrote."""
    servers = {"journal": WITH_JOURNAL, "history too": WITH_HISTORY, "no journal": WITHOUT_JOURNAL}
    measured: dict[str, list[Measured]] = {name: [] for name in servers}
    window_s = case.window_s
    journaled = []
    with _bench(case, folder, servers) as bench:
        for number in range(rounds):
            show_progress(f"rates, {case.name}: round {number + 1} of {rounds}")
            before = fetch_status(bench.addresses["journal"], START_S)
            measured["journal"].append(bench.measure("journal", 0.25 * window_s, window_s))
            after = fetch_status(bench.addresses["journal"], START_S)
            for name in ("history too", "no journal"):
                measured[name].append(bench.measure(name, 0.25 * window_s, window_s))
            journaled.append(_between(before, after, folder, 0.25 * window_s))
        peaks = {name: round(peak_resident_bytes(process.pid) / 1e6) for name, process in bench.servers.items()}
    ratio_name = f"{case.name} journal / no journal"
    results.ratio(ratio_name, paired_ratio(measured["journal"], measured["no journal"]), TARGETS.get(case.name))
    disk = {"disk alone": median(turn.disk_updates_per_s for turn in journaled)}
    for name, turns in measured.items():
        results.add("updates per second", case.name, {name: median(turn.updates_per_s for turn in turns)})
        results.add("server CPU, us per update", case.name, {name: median(turn.server_cpu_us for turn in turns)})
        results.add("refused as busy", case.name, {name: sum(turn.refusals for turn in turns)})
    results.add("updates per second", case.name, disk)
    results.add("server's peak memory, MB", case.name, peaks)
    written = {
        "bytes per update": median(turn.nbytes / turn.updates for turn in journaled),
        "entries per update": median(turn.entries / turn.updates for turn in journaled),
        "syncs per update": median(turn.syncs / turn.updates for turn in journaled),
        "ms per sync, disk alone": median(1e3 * turn.disk_s for turn in journaled),
    }
    results.add("journal writes", case.name, written)


def run_starts(case: Case, results: Results, folder: str, rounds: int) -> None:
    """Kill a hub that has received updates, and time how long its next start takes to recover."""
    show_progress(f"recovery, {case.name}: making a journal")
    with tempfile.TemporaryDirectory(dir=folder) as runs, Children() as children:
        with Bench(case, runs, {"hub": NEVER_RECOVERED}) as bench:
            rate = bench.measure("hub", 0.0, case.window_s).updates_per_s
        found: list[tuple[float, int, int]] = []
        for number in range(rounds):
            show_progress(f"recovery, {case.name}: round {number + 1} of {rounds}")
            child = children.start(open_run, case.length, f"{runs}/hub")
            found.append(child.hear(RECOVER_S))
            child.process.join()
    _, updates, entries = found[0]
    taken_s = statistics.median(seconds for seconds, _, _ in found)
    results.ratio(f"{case.name} recovered / exchanged", updates / taken_s / rate)
    columns = {"updates": updates, "entries": entries, "s per 1,000": 1e3 * taken_s / updates}
    results.add("recovery", case.name, columns, 4)


def run_saves(case: Case, results: Results, folder: str, rounds: int) -> None:
    """Compare the rates with continuous checkpoints and without checkpoints or journal."""
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
    results.ratio(f"{case.name} saving / not", paired_ratio(measured["saving"], measured["not saving"]))
    rates = {name: median(turn.updates_per_s for turn in turns) for name, turns in measured.items()}
    results.add("updates per second", f"{case.name}, no journal", rates)
    results.add("checkpoint", case.name, {"s from one to the next": median(taken_s)})


def open_run(length: int, folder: str, pipe: "Connection[tuple[float, int, int], None]") -> None:
    """Recover the run of a `NEVER_RECOVERED` hub; send its seconds, updates and entries."""
    spec, settings = make_spec(length), RECOVERABLE.core_settings()

    run = HubRun(FolderDisk(Path(folder)), Rules(spec, POLICY, settings))
    begin_s = time.perf_counter()
    run.open(
        Rules.make_core,
        lambda: (np.zeros(length, np.float32), 0),
        lineage=LINEAGE,
        draw_session=lambda: bytes(16),
        created_s=0.0,
    )
    pipe.send((time.perf_counter() - begin_s, run.core.updates_applied, run.entries))


def write_and_sync_s(folder: str, nbytes: int, seconds: float) -> float:
    """Return the mean time in which the disk appends and syncs `nbytes`.

    It repeats this for `seconds`, with files as long as journal segments.
    """
    disk = FolderDisk(Path(folder))
    content = np.random.default_rng(3).bytes(nbytes)
    file, length, count = disk.create(PROBE_FILE, padded=True), 0, 0
    begin_s = time.perf_counter()
    try:
        while (elapsed_s := time.perf_counter() - begin_s) < seconds or not count:
            if length > SEGMENT_BYTES_MAX:
                file.close()
                file, length = disk.create(PROBE_FILE, padded=True), 0
            file.write([content])
            file.sync()
            length += nbytes
            count += 1
    finally:
        file.close()
        disk.remove(PROBE_FILE)
    return elapsed_s / count


@contextmanager
def _bench(case: Case, folder: str, servers: Mapping[str, Serve]) -> Iterator[Bench]:
    """Yield the processes of a case; their runs are in their own folder in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as runs, Bench(case, runs, servers) as bench:
        yield bench


def _between(before: dict[str, Any], after: dict[str, Any], folder: str, seconds: float) -> Journaled:
    """Return a journal's growth between two statuses, and time the disk with as many bytes."""
    entries, nbytes, syncs = (
        after["journal"][key] - before["journal"][key] for key in ("entries", "bytes", "syncs")
    )
    updates = after["updates_applied"] - before["updates_applied"]
    return Journaled(updates, entries, nbytes, syncs, write_and_sync_s(folder, nbytes // syncs, seconds))


def _save_s(run: str) -> float:
    """Return the time of a checkpoint, from the start of one to the start of the next."""
    begun_s = [manifest.created_s for _, manifest in CheckpointStore(FolderDisk(Path(run)), 3).manifests()[0]]
    return min(later - earlier for later, earlier in itertools.pairwise(begun_s))  # one may include a pause


PARSER = make_parser("What the journal, the history and the checkpoints cost the hub.")
PARSER.add_argument("--case", default="", help="run only cases whose name starts with this, such as '1 MB'")
PARSER.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk to measure")
PARSER.add_argument("--rounds", type=int, help="turns of each server [default: 7, with --short 3]")


@benchmark(PARSER)
def main(arguments: argparse.Namespace, results: Results) -> None:
    """Run all cases, or those whose name starts with `--case`."""
    rounds, folder = arguments.rounds or ROUNDS[arguments.form], arguments.folder
    if not arguments.case:
        measure_history(arguments.form, results)
    for case in TINY_CASES if arguments.form == Form.QUICK else CASES:
        if case.name.startswith(arguments.case):
            timed = case.in_form(arguments.form)
            run_rates(timed, results, folder, rounds)
            if 4 * case.length <= RECOVERED_BYTES_MAX:
                run_starts(timed, results, folder, rounds)
            else:
                run_saves(timed, results, folder, rounds)


if __name__ == "__main__":
    main()
