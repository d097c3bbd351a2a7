"""The runs in a folder, as a person wants to see them; nothing is written."""

import fcntl
import os
from pathlib import Path

import msgspec

from edgeasync.durable.checkpoint import CheckpointStore, Manifest, best_first
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import segment_names
from edgeasync.errors import StorageError
from edgeasync.runtime.hub import RECORD_FILE
from edgeasync.runtime.model_file import MODEL_FILE


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """How good a checkpoint is; the loss and accuracy are of the last evaluation before it."""

    checkpoint: str
    version: int
    loss: float | None
    accuracy: float | None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run; version, updates and lineage are the newest checkpoint's, and the journal may lead further.

    `written_s` is by the wall clock; `trouble` has a sentence for each thing that is wrong.
    """

    name: str
    version: int | None
    updates_applied: int | None
    lineage: str | None
    written_s: float | None
    checkpoints: int
    journal_bytes: int
    newest: Mark | None
    best: Mark | None
    in_use: bool
    trouble: list[str]


def list_runs(folder: Path) -> list[RunSummary]:
    """Return the runs in a folder, by name; raises `StorageError` if that cannot be read."""
    try:
        runs = sorted(path for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        raise StorageError(f"{folder}: no such folder; give the folder that the runs are in") from None
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read: {error.strerror}; fix its rights") from error
    return [summary for path in runs if (summary := _look_at(path)) is not None]


def _look_at(run: Path) -> RunSummary | None:
    """Return what there is to say of a folder; nothing if it is no run."""
    disk = FolderDisk(run)
    trouble: list[str] = []
    manifests: list[tuple[str, Manifest]] = []
    segments: dict[str, os.stat_result] = {}
    try:
        for name in segment_names(disk):
            segments[name] = (run / name).stat()
        manifests, unreadable = CheckpointStore(disk, keep=1).manifests()
        trouble += [reason for _, reason in unreadable]
    except FileNotFoundError:
        pass  # a hub has dropped what its checkpoints cover
    except OSError as error:
        trouble.append(f"cannot be read: {error.strerror}; fix its rights")
    except StorageError as error:
        trouble.append(str(error))
    if not (manifests or segments or trouble):
        if not any((run / name).exists() for name in (RECORD_FILE, MODEL_FILE)):
            return None
        trouble.append("has no checkpoint; a hub begins it anew, from model.safetensors if that is there")
    trouble += [reason for name, manifest in manifests if (reason := _wrong_with(run, name, manifest))]
    if segments and not manifests:
        trouble.append("has a journal but no checkpoint to begin from")
    newest = manifests[0] if manifests else None
    best = best_first(manifests)[0] if manifests else None
    times = [entry.st_mtime for entry in segments.values()] + [manifest.created_s for _, manifest in manifests]
    return RunSummary(
        name=run.name,
        version=None if newest is None else newest[1].version,
        updates_applied=None if newest is None else newest[1].updates_applied,
        lineage=None if newest is None else newest[1].lineage,
        written_s=max(times, default=None),
        checkpoints=len(manifests),
        journal_bytes=sum(entry.st_size for entry in segments.values()),
        newest=None if newest is None else _mark(*newest),
        best=None if best is None else _mark(*best),
        in_use=_is_in_use(run),
        trouble=trouble,
    )


def _wrong_with(run: Path, name: str, manifest: Manifest) -> str:
    """Return what can be seen to be wrong with a checkpoint without reading it."""
    try:
        nbytes = (run / f"{name}.safetensors").stat().st_size
    except FileNotFoundError:
        # A hub removes the manifest first.
        return f"{name}: its arrays are missing" if (run / f"{name}.json").exists() else ""
    except OSError as error:
        return f"{name}: cannot be read: {error.strerror}"
    return "" if nbytes == manifest.nbytes else f"{name}: has {nbytes} bytes, not {manifest.nbytes}"


def _mark(name: str, manifest: Manifest) -> Mark:
    return Mark(checkpoint=name, version=manifest.version, loss=manifest.loss, accuracy=manifest.accuracy)


def _is_in_use(run: Path) -> bool:
    """Return whether a hub holds the folder's lock. To see that it is shared for a moment, and given back."""
    try:
        lock = os.open(run / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
