"""`edgeasync runs`: the runs in a folder, or the checkpoints of one run."""

import time
from pathlib import Path

from edgeasync.cli.output import Printer, print_table
from edgeasync.cli.status import in_bytes
from edgeasync.durable.run_folder import RunFolder
from edgeasync.ops.runs import (
    BestVersion,
    CheckpointSummary,
    Mark,
    RunSummary,
    list_checkpoints,
    list_runs,
)


def print_runs(folder: Path, printer: Printer) -> None:
    """Print a line for every run, and below it one for everything that is wrong with it.

    Of the folder of one run, print its checkpoints.
    """
    if RunFolder(folder).is_known:
        _print_checkpoints(folder, printer)
        return
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


def _print_checkpoints(run: Path, printer: Printer) -> None:
    found = list_checkpoints(run)
    if printer.json:
        for one in found:
            printer.object(one)
        return
    if not found:
        printer.line(f"no checkpoints in {run}")
        return
    header = ("checkpoint", "version", "updates", "lineage", "written", "size", "loss")
    rows = [
        (
            one.checkpoint,
            _shown(one.version),
            _shown(one.updates_applied),
            one.lineage or "-",
            _time(one.written_s),
            "-" if one.bytes is None else in_bytes(one.bytes),
            _quality(one),
        )
        for one in found
    ]
    print_table(printer, [header, *rows])
    for one in found:
        if one.trouble:
            printer.line(one.trouble)


def _row(run: RunSummary) -> tuple[str, ...]:
    return (
        run.name,
        _shown(run.version),
        _shown(run.updates_applied),
        run.lineage or "-",
        _time(run.written_s),
        str(run.checkpoints),
        in_bytes(run.journal_bytes),
        _quality(run.newest),
        _quality(run.best),
        "at work" if run.in_use else "-",
    )


def _shown(number: int | None) -> str:
    return "-" if number is None else str(number)


def _time(written_s: float | None) -> str:
    return "-" if written_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))


def _quality(mark: Mark | BestVersion | CheckpointSummary | None) -> str:
    if mark is None or mark.loss is None:
        return "-"
    return f"{mark.loss:.4g}" if mark.accuracy is None else f"{mark.loss:.4g}, {mark.accuracy:.2%}"
