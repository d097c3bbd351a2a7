"""`edgeasync runs`: the runs in a folder, or the checkpoints of one run."""

import time
from collections.abc import Sequence
from pathlib import Path

from edgeasync.cli.output import Printer, print_table
from edgeasync.core.hub.device_words import in_bytes
from edgeasync.durable.run_folder import RunFolder
from edgeasync.ops.runs import (
    BestVersion,
    CheckpointSummary,
    Mark,
    RunSummary,
    list_checkpoints,
    list_runs,
)

RUN = ("run", "version", "updates", "lineage", "written", "checkpoints", "journal", "newest", "best", "hub")
CHECKPOINT = ("checkpoint", "version", "updates", "lineage", "written", "size", "loss")


def print_runs(folder: Path, printer: Printer) -> None:
    """Print the runs in a folder, or the checkpoints of one run, and their problems."""
    if RunFolder(folder).is_known:
        checkpoints = list_checkpoints(folder)
        trouble = [one.trouble for one in checkpoints if one.trouble]
        _print(
            printer, checkpoints, [CHECKPOINT, *map(_checkpoint, checkpoints)], trouble, f"checkpoints in {folder}"
        )
    else:
        runs = list_runs(folder)
        trouble = [f"{run.name}: {reason}" for run in runs for reason in run.trouble]
        _print(printer, runs, [RUN, *map(_run, runs)], trouble, f"runs in {folder}")


def _print(
    printer: Printer, found: Sequence[object], table: Sequence[tuple[str, ...]], trouble: list[str], what: str
) -> None:
    """Print findings as JSON objects, or as a table followed by lines about problems."""
    if printer.json:
        for one in found:
            printer.object(one)
    elif not found:
        printer.line(f"no {what}")
    else:
        print_table(printer, table)
        for line in trouble:
            printer.line(line)


def _checkpoint(one: CheckpointSummary) -> tuple[str, ...]:
    return one.checkpoint, *_state(one), "-" if one.bytes is None else in_bytes(one.bytes), _quality(one)


def _run(run: RunSummary) -> tuple[str, ...]:
    sizes = str(run.checkpoints), in_bytes(run.journal_bytes)
    return (
        run.name,
        *_state(run),
        *sizes,
        _quality(run.newest),
        _quality(run.best),
        "running" if run.in_use else "-",
    )


def _state(one: RunSummary | CheckpointSummary) -> tuple[str, ...]:
    return _shown(one.version), _shown(one.updates_applied), one.lineage or "-", _time(one.written_s)


def _shown(number: int | None) -> str:
    return "-" if number is None else str(number)


def _time(written_s: float | None) -> str:
    return "-" if written_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))


def _quality(mark: Mark | BestVersion | CheckpointSummary | None) -> str:
    if mark is None or mark.loss is None:
        return "-"
    return f"{mark.loss:.4g}" if mark.accuracy is None else f"{mark.loss:.4g}, {mark.accuracy:.2%}"
