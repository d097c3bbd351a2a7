"""Run benchmarks one after the other, each in its own process, and store their results."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks import surroundings
from benchmarks.records import RESULTS, make_record, write_record
from benchmarks.report import CONDITIONAL, INTERRUPTED, UNFIT, Form, show_progress

GRACE_S = 20.0
"""How long an interrupted benchmark may take to end its processes and remove its files."""

Outcome = Literal["measured", "missed a bound", "failed", "not for this machine"]


def run_all(names: Sequence[str], form: Form, folder: Path = RESULTS, *, root: Path = surroundings.ROOT) -> int:
    """Run benchmarks of the checkout `root` and write their records; return the exit code.

    The exit code is 1 if a benchmark failed or missed a bound. A failed benchmark keeps its older
    record. Benchmarks that this machine cannot run are skipped. A `KeyboardInterrupt` stops the
    running benchmark and keeps the records written so far.
    """
    outcomes: dict[str, Outcome] = {}
    try:
        for number, name in enumerate(names, start=1):
            show_progress(f"[{number} of {len(names)}] {name}, {form}")
            outcomes[name] = run_one(name, form, folder, root)
    except KeyboardInterrupt:
        kept = [name for name, outcome in outcomes.items() if outcome in {"measured", "missed a bound"}]
        show_progress(f"interrupted; written before: {', '.join(kept) or 'nothing'}")
        return INTERRUPTED
    for outcome in ("not for this machine", "missed a bound", "failed"):
        if found := [name for name in names if outcomes[name] == outcome]:
            show_progress(f"{outcome}: {', '.join(found)}")
    return int(any(outcome in {"missed a bound", "failed"} for outcome in outcomes.values()))


def run_one(name: str, form: Form, folder: Path, root: Path) -> Outcome:
    """Run one benchmark, and write its record if it printed results."""
    before: dict[str, Any] = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": surroundings.commit(),
        "machine": surroundings.machine(),
        "versions": surroundings.versions(),
        "load": surroundings.load(),
        "disk": surroundings.disk(tempfile.gettempdir()),
    }
    started_s = time.monotonic()
    code, printed = _run(name, ["--json"] + [f"--{form}"] * (form != Form.FULL), root)
    seconds = round(time.monotonic() - started_s, 1)
    if name in CONDITIONAL and code == UNFIT:
        return "not for this machine"
    finished = code in {0, 1}  # 1 with a result means that a bound was missed
    try:
        record = make_record(json.loads(printed if finished else ""), **before, seconds=seconds)
    except ValueError as error:  # not JSON, or not a benchmark's output
        show_progress(f"{name}: failed after {seconds:g} s with exit code {code}; nothing is written: {error}")
        return "failed"
    path = write_record(record, folder)
    show_progress(f"{name}: {seconds:g} s; {path.name} is written")
    for ratio in record.missed():
        show_progress(f"{name}: {ratio}: {record.ratios[ratio]} is below {record.targets[ratio]:g}")
    return "missed a bound" if code else "measured"


def _run(name: str, flags: list[str], root: Path) -> tuple[int, str]:
    """Run a benchmark as a process; return its exit code and its output.

    The process leads a new session, so that Ctrl-C reaches only this process, and so that all its
    children can be killed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{name}", *flags], cwd=root, stdout=output, start_new_session=True
        )
        with ended(process):
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
                raise
        output.seek(0)
        return code, output.read()


@contextmanager
def ended(process: "subprocess.Popen[Any]") -> Iterator[None]:
    """Kill what remains of a process's session when the block ends."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
