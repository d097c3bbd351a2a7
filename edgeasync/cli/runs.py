"""`edgeasync runs`: the runs in a folder."""

import time
from pathlib import Path

from edgeasync.cli.output import Printer, print_table
from edgeasync.cli.status import in_bytes
from edgeasync.runtime.runs import Mark, RunSummary, list_runs


def print_runs(folder: Path, printer: Printer) -> None:
    """Print a line for every run, and below it one for everything that is wrong with it."""
    found = list_runs(folder)
    if printer.json:
        for run in found:
            printer.object(run)
        return
    if not found:
        printer.line(f"no runs in {folder}")
        return
    header = ("run", "version", "updates", "lineage", "written", "checkpoints", "journal", "newest", "best", "hub")
    print_table(printer, [header, *[_row(run) for run in found]])
    for run in found:
        for trouble in run.trouble:
            printer.line(f"{run.name}: {trouble}")


def _row(run: RunSummary) -> tuple[str, ...]:
    written = "-" if run.written_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.written_s))
    return (
        run.name,
        "-" if run.version is None else str(run.version),
        "-" if run.updates_applied is None else str(run.updates_applied),
        run.lineage or "-",
        written,
        str(run.checkpoints),
        in_bytes(run.journal_bytes),
        _quality(run.newest),
        _quality(run.best),
        "at work" if run.in_use else "-",
    )


def _quality(mark: Mark | None) -> str:
    if mark is None or mark.loss is None:
        return "-"
    return f"{mark.loss:.4g}" if mark.accuracy is None else f"{mark.loss:.4g}, {mark.accuracy:.2%}"
