"""The files of a run's folder, and how to open them for reading.

This module neither writes nor locks. So the folder may belong to another user, be a copy, or be in
use by a hub.
"""

from pathlib import Path
from typing import Self, TypeVar

import msgspec
from msgspec.structs import replace

from edgeasync.core.hub.events import Resumed
from edgeasync.core.recovery.log import read_entry
from edgeasync.durable.checkpoint import CheckpointStore, Manifest
from edgeasync.durable.disk import Disk, FolderDisk, FolderSnapshot
from edgeasync.durable.files import is_locked
from edgeasync.durable.history import Rows, read_rows
from edgeasync.durable.journal import JournalReading, segment_names
from edgeasync.durable.json_file import read_json
from edgeasync.errors import StorageError
from edgeasync.plugins import refuse_modules_in

RECORD_FILE = "hub.json"
MODEL_FILE = "model.safetensors"
BEST_FILE = "best.safetensors"
FORWARD_FILE = "forward.onnx"
TRAINING_FILE = "training.onnx"

ATTEMPTS = 10
"""How often to retry reading a folder that changes meanwhile."""

Kind = TypeVar("Kind")


class RunFolder:
    """The files of a run: checkpoints, journal, history and the settings of its last start.

    `disk` contains the files; by default it is the folder at `path`, which messages name. A hub,
    which writes checkpoints, sets how many to `keep`.
    """

    def __init__(self, path: Path = Path(), disk: Disk | None = None, *, keep: int = 1) -> None:
        self.path = path
        self.disk = FolderDisk(path) if disk is None else disk
        self.checkpoints = CheckpointStore(self.disk, keep)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the run at a path, and forbid importing modules from it.

        Raises `StorageError` if the folder is missing.
        """
        if not path.is_dir():
            raise StorageError(f"{path}: no such folder; pass the folder of a hub's run")
        refuse_modules_in(path)
        return cls(path)

    @property
    def in_use(self) -> bool:
        """Whether a hub is using the folder."""
        return is_locked(self.path)

    @property
    def is_known(self) -> bool:
        """Whether a hub has begun a run here, or saved its model."""
        try:
            return any((self.path / name).exists() for name in (RECORD_FILE, MODEL_FILE))
        except OSError:  # reading the folder raises the error
            return False

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, readable or not; raises `StorageError`."""
        return self.path.is_dir() and any(self.checkpoints.manifests())

    def record(self, kind: type[Kind], remedy: str = "") -> Kind:
        """Return the settings of the last start; raises `FileNotFoundError` and `StorageError`."""
        return read_json(self.path / RECORD_FILE, kind, remedy=remedy)

    def journal(self, after: int = 0) -> JournalReading:
        """Return a reading of the journal's records after a number."""
        return JournalReading(self.disk, after)

    def history(self) -> Rows:
        """Return the history; a damaged or missing one sets `trouble`."""
        return read_rows(self.disk)

    def snapshot(self) -> "RunSnapshot":
        """Return checkpoints and journal as they are at one moment; raises `StorageError`.

        A hub drops journal entries that its checkpoints cover. So the journal is opened between two
        equal listings of the checkpoints.
        """
        checkpoints = self.checkpoints.manifests()
        for _ in range(ATTEMPTS):
            try:
                journal = FolderSnapshot(self.path, segment_names(self.disk))
            except OSError as error:
                raise StorageError(
                    f"{self.path}: the journal cannot be read: {error.strerror}; check its permissions"
                ) from error
            before, checkpoints = checkpoints, self.checkpoints.manifests()
            if before == checkpoints:
                return RunSnapshot(journal, *checkpoints)
            journal.close()
        raise StorageError(f"{self.path}: changes faster than it can be read; use a copy of the folder")


class JournalPart(msgspec.Struct, frozen=True):
    """Checkpoints, oldest first, from which the journal leads to entry `last`.

    `trouble` explains why it leads no further.
    """

    starts: list[tuple[str, Manifest]]
    last: int
    trouble: str

    @property
    def first(self) -> int:
        """The entry of the oldest checkpoint."""
        return self.starts[0][1].journal


class RunSnapshot:
    """A run's checkpoints, newest first, and its journal, which stays open until `close`.

    `unreadable` are the names of unreadable checkpoints, with the error of each.
    """

    def __init__(
        self, journal: FolderSnapshot, manifests: list[tuple[str, Manifest]], unreadable: list[tuple[str, str]]
    ) -> None:
        self.journal = journal
        self.manifests = manifests
        self.unreadable = unreadable

    def close(self) -> None:
        """Close the journal's files."""
        self.journal.close()

    def follow(self) -> tuple[Manifest, str]:
        """Return the newest manifest, updated by the journal, and why the journal ends.

        Version, lineage and count of updates are those after the last entry. The entries are read,
        but nothing is recomputed.
        """
        start = self.manifests[0][1]
        version, updates_applied, lineage, trouble = start.version, start.updates_applied, start.lineage, ""
        try:
            for record in JournalReading(self.journal, start.journal).records():
                entry = read_entry(record.entry)
                version = entry.version
                updates_applied += sum(len(fold.weights) for fold in entry.folds)
                if isinstance(entry.event, Resumed):
                    lineage = entry.event.lineage or lineage
        except StorageError as error:
            trouble = str(error)
        return replace(start, version=version, updates_applied=updates_applied, lineage=lineage), trouble

    def parts(self, starts: list[tuple[str, Manifest]]) -> list[JournalPart]:
        """Split the journal into parts that lead from one checkpoint to others.

        `starts` are the checkpoints, ordered oldest first. A part reaches a checkpoint if it
        contains all entries before the checkpoint and they lead to the checkpoint's version. If a
        part ends early, the next one begins at the first checkpoint that it did not reach.
        """
        found = []
        while starts:
            versions = {manifest.journal: manifest.version for _, manifest in starts}
            last, trouble = starts[0][1].journal, ""
            try:
                for record in JournalReading(self.journal, last).records():
                    version = read_entry(record.entry).version
                    if versions.get(record.number, version) != version:
                        trouble = f"entry {record.number} leads to another version than its checkpoint"
                        break
                    last = record.number
            except StorageError as error:
                trouble = str(error)
            found.append(JournalPart([start for start in starts if start[1].journal <= last], last, trouble))
            starts = [start for start in starts if start[1].journal > last]
        return found
