"""Lists the runs in a folder. Read-only."""

import os
from contextlib import closing
from pathlib import Path

import msgspec

from edgeasync.durable.checkpoint import Manifest
from edgeasync.durable.run_folder import BEST_FILE, RunFolder
from edgeasync.errors import StorageError
from edgeasync.graphs.model_file import read_header


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, with loss and accuracy of the last evaluation before it."""

    checkpoint: str
    version: int
    loss: float | None
    accuracy: float | None


class BestVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The version with the best evaluation, stored in `best.safetensors`."""

    version: int
    loss: float
    accuracy: float | None


class CheckpointSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a run.

    `entry` is the last journal entry that the checkpoint contains. `loss` and `accuracy` are from
    the last evaluation before it. `written_s` is wall-clock time. `trouble` describes a problem, or
    is empty.
    """

    checkpoint: str
    version: int | None = None
    updates_applied: int | None = None
    lineage: str | None = None
    entry: int | None = None
    written_s: float | None = None
    bytes: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    trouble: str = ""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a folder of runs.

    `version`, `updates_applied` and `lineage` are the values after the journal's last entry.
    `newest` is the newest checkpoint. `best` is the version that `export --best` writes.
    `written_s` is the wall-clock time of the last write. `trouble` has a sentence for each problem.
    """

    name: str
    version: int | None
    updates_applied: int | None
    lineage: str | None
    written_s: float | None
    checkpoints: int
    journal_bytes: int
    newest: Mark | None
    best: BestVersion | None
    in_use: bool
    trouble: list[str]


def list_runs(folder: Path) -> list[RunSummary]:
    """Return the runs in a folder, sorted by name. Raises `StorageError` if it cannot be read."""
    try:
        runs = sorted(path for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        raise StorageError(f"{folder}: no such folder; pass the folder that contains the runs") from None
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read: {error.strerror}; correct its permissions") from error
    return [summary for path in runs if (summary := _summarize(path)) is not None]


def list_checkpoints(run: Path) -> list[CheckpointSummary]:
    """Return a run's checkpoints, newest first, unreadable ones last. Raises `StorageError`."""
    manifests, unreadable = RunFolder(run).checkpoints.manifests()
    found = [
        CheckpointSummary(
            checkpoint=name,
            version=manifest.version,
            updates_applied=manifest.updates_applied,
            lineage=manifest.lineage,
            entry=manifest.journal,
            written_s=manifest.created_s,
            bytes=manifest.nbytes,
            loss=manifest.loss,
            accuracy=manifest.accuracy,
            trouble=_wrong_with(run, name, manifest),
        )
        for name, manifest in manifests
    ]
    return found + [CheckpointSummary(checkpoint=name, trouble=reason) for name, reason in unreadable]


def _summarize(run: Path) -> RunSummary | None:
    """Return the summary of a folder, or `None` if it is not a run."""
    trouble: list[str] = []
    manifests: list[tuple[str, Manifest]] = []
    segments: list[os.stat_result] = []
    end, stops = None, ""
    folder = RunFolder(run)
    try:
        with closing(folder.snapshot()) as files:
            manifests = files.manifests
            trouble += [reason for _, reason in files.unreadable]
            segments = [files.journal.status(name) for name in files.journal.names()]
            if manifests:
                end, stops = files.follow()
    except StorageError as error:
        trouble.append(str(error))
    if not (manifests or segments or trouble):
        if not folder.is_known:
            return None
        trouble.append("has no checkpoint; a hub starts it from scratch, or from model.safetensors if that exists")
    trouble += [reason for name, manifest in manifests if (reason := _wrong_with(run, name, manifest))]
    if stops:
        trouble.append(stops)
    if segments and not manifests:
        trouble.append("has a journal, but no checkpoint to start from")
    times = [status.st_mtime for status in segments] + [manifest.created_s for _, manifest in manifests]
    return RunSummary(
        name=run.name,
        version=None if end is None else end.version,
        updates_applied=None if end is None else end.updates_applied,
        lineage=None if end is None else end.lineage,
        written_s=max(times, default=None),
        checkpoints=len(manifests),
        journal_bytes=sum(status.st_size for status in segments),
        newest=_mark(*manifests[0]) if manifests else None,
        best=_best(run),
        in_use=folder.in_use,
        trouble=trouble,
    )


def _wrong_with(run: Path, name: str, manifest: Manifest) -> str:
    """Return the problems of a checkpoint that can be detected without reading its arrays."""
    try:
        nbytes = (run / f"{name}.safetensors").stat().st_size
    except FileNotFoundError:
        # A hub deletes the manifest first, so arrays missing without a manifest are not a problem.
        return f"{name}: its arrays are missing" if (run / f"{name}.json").exists() else ""
    except OSError as error:
        return f"{name}: cannot be read: {error.strerror}"
    return "" if nbytes == manifest.nbytes else f"{name}: has {nbytes} bytes, expected {manifest.nbytes}"


def _best(run: Path) -> BestVersion | None:
    """Return the evaluation of the best version from its file, or `None`."""
    try:
        found = read_header(run / BEST_FILE).evaluation
    except StorageError:
        return None
    return None if found is None else BestVersion(version=found.number, loss=found.loss, accuracy=found.accuracy)


def _mark(name: str, manifest: Manifest) -> Mark:
    return Mark(checkpoint=name, version=manifest.version, loss=manifest.loss, accuracy=manifest.accuracy)
