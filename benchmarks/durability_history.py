"""Measure the processor time and disk space of history rows, for `durability`.

A core processes a fleet's updates, and only the history writer is timed. It gathers rows as in the
hub's loop, and writes them every two seconds of virtual time, as the hub's saving thread does.
Times are processor times.
"""

import tempfile
import time
from pathlib import Path

from benchmarks.report import Form, Results, show_progress
from benchmarks.scale import Bench
from edgeasync.core.hub.effects import HubEffect
from edgeasync.core.hub.events import HubEvent
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.history import HISTORY_FILE, read_rows
from edgeasync.durable.history_writer import FLUSH_S, HistoryWriter
from edgeasync.host.host_info import prepare_for_service

ROW_US_MAX = 3.0
ROW_BYTES_MAX = 64.0

RATES = (100, 1000)
"""Updates per second, which equals the number of devices: each exchanges once a second."""

ROWS = {Form.FULL: 200_000, Form.SHORT: 40_000, Form.QUICK: 2_000}
EVENTS_AT_ONCE = 32


class Writing(Bench):
    """A core whose updates go into a history, and the processor time of writing it.

    Rows are gathered for several events at a time, because reading the clock for each event would
    cost as much as a row.
    """

    def __init__(self, devices: int, folder: Path, rows_max: int) -> None:
        self.writer = HistoryWriter(FolderDisk(folder), rows_max)
        self.spent_s = 0.0
        self._entries = 0
        self._decided: list[tuple[HubEvent, list[HubEffect], float]] = []
        super().__init__(devices)
        handle = self.core.handle

        def noted(event: HubEvent, now_s: float) -> list[HubEffect]:
            effects = handle(event, now_s)
            self._decided.append((event, effects, now_s))
            if len(self._decided) == EVENTS_AT_ONCE:
                self._gather()
            return effects

        vars(self.core)["handle"] = noted

    def write(self) -> None:
        """Write the rows of all events so far."""
        self._gather()
        begun_s = time.thread_time()
        self.writer.flush()
        self.spent_s += time.thread_time() - begun_s

    def _gather(self) -> None:
        writer, core, entry = self.writer, self.core, self._entries
        begun_s = time.thread_time()
        for event, effects, now_s in self._decided:
            entry += 1
            writer.note(core, entry, event, effects, now_s)
        self.spent_s += time.thread_time() - begun_s
        self._entries = entry
        self._decided.clear()


def measure_rows(rate: int, rows: int, rows_max: int) -> dict[str, float]:
    """Return the cost of a row at a rate, including its share of events without rows."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Writing(rate, Path(folder), rows_max)
        for sequence in range(1, rows // rate + 1):
            for number in range(rate):
                bench.now_s += 1.0 / rate
                bench.exchange(number, sequence)
            if sequence % FLUSH_S == 0:
                bench.write()
        bench.write()
        nbytes = (Path(folder) / HISTORY_FILE).stat().st_size
        begun_s = time.thread_time()
        kept = len(read_rows(FolderDisk(Path(folder))).updates)
        read_s = time.thread_time() - begun_s
    return {
        "us per row": 1e6 * bench.spent_s / (rows // rate * rate),
        "bytes per row": nbytes / kept,
        "rows kept": kept,
        "ms to read them": 1e3 * read_s,
    }


def measure_history(form: Form, results: Results) -> None:
    """Measure rows at each rate, once keeping all rows and once with thinning."""
    rows = ROWS[form]
    prepare_for_service()
    for rate in RATES:
        for name, rows_max in (("", 10 * rows), (", thinned again and again", rows // 5)):
            show_progress(f"{rows:,} rows at {rate} a second{name}")
            found = measure_rows(rate, rows, rows_max)
            results.add("a row of the history", f"{rate:,} updates a second{name}", found, 2)
            if not name:
                results.bound(f"us per row at {rate:,} a second", found["us per row"], ROW_US_MAX)
                results.bound(f"bytes per row at {rate:,} a second", found["bytes per row"], ROW_BYTES_MAX)
