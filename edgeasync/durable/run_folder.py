"""The files of a run's folder, and functions that open them for reading.

This module never writes or locks anything. So the folder may belong to another user, be a copy, or
be in use by a hub.
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
"""Number of attempts to read a folder that changes while it is read."""

Kind = TypeVar("Kind")


class RunFolder:
    """The files of a run: checkpoints, journal, history and the settings of its last start.

    `disk` contains the files. By default, it is the folder at `path`. Error messages name `path`.
    `keep` is the number of checkpoints to keep; only a hub, which writes checkpoints, sets it.
    """

    def __init__(self, path: Path = Path(), disk: Disk | None = None, *, keep: int = 1) -> None:
        self.path = path
        self.disk = FolderDisk(path) if disk is None else disk
        self.checkpoints = CheckpointStore(self.disk, keep)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the run at a path. No modules can be imported from that folder afterwards.

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
        """Whether a hub has started a run in this folder or saved its model there."""
        try:
            return any((self.path / name).exists() for name in (RECORD_FILE, MODEL_FILE))
        except OSError:  # reading the folder raises the error
            return False

    @property
    def has_checkpoint(self) -> bool:
        """Return whether the folder contains a checkpoint, readable or not; raises `StorageError`."""
        return self.path.is_dir() and any(self.checkpoints.manifests())

    def record(self, kind: type[Kind], remedy: str = "") -> Kind:
        """Return the settings of the last start; raises `FileNotFoundError` and `StorageError`."""
        return read_json(self.path / RECORD_FILE, kind, remedy=remedy)

    def journal(self, after: int = 0) -> JournalReading:
        """Return a `JournalReading` of the records with numbers above `after`."""
        return JournalReading(self.disk, after)

    def history(self) -> Rows:
        """Return the history. If it is damaged or missing, `trouble` is set."""
        return read_rows(self.disk)

    def snapshot(self) -> "RunSnapshot":
        """Return a consistent snapshot of checkpoints and journal; raises `StorageError`.

        A hub removes journal entries that its checkpoints cover. So the journal is opened between
        two listings of the checkpoints, which must be equal.
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
    """A part of the journal that leads from the first of its checkpoints to entry `last`.

    `starts` contains its checkpoints, oldest first. `trouble` explains why the part ends at `last`.
    """

    starts: list[tuple[str, Manifest]]
    last: int
    trouble: str

    @property
    def first(self) -> int:
        """The number of the last entry that this part's oldest checkpoint covers."""
        return self.starts[0][1].journal


class RunSnapshot:
    """A run's checkpoints, newest first, and its journal, which stays open until `close`.

    `unreadable` contains the names of unreadable checkpoints and the error for each.
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
        """Return the newest manifest, updated from the journal, and an error message.

        The manifest's version, lineage and number of updates are those after the last entry. The
        entries are read, but the state is not recomputed. The message is empty unless the journal
        is damaged.
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
        """Split the journal into parts, each of which leads from one checkpoint to later ones.

        `starts` contains the checkpoints, oldest first. A part reaches a checkpoint if it contains
        all entries that precede the checkpoint and if they lead to the checkpoint's version. The
        next part begins at the first checkpoint that the previous part did not reach.
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
