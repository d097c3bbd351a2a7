"""A run's folder: the names of its files, and what opens them to be read.

Nothing here writes or holds a lock. So the folder may be another user's, a copy, or one in which a hub is at work.
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
"""How often a folder that changes while it is looked at is looked at again."""

Kind = TypeVar("Kind")


class RunFolder:
    """The files of a run: its checkpoints, journal, history, and the settings of its last start.

    `disk` holds the files; without one it is the folder at `path`, which also names the run in messages. A
    hub, which writes checkpoints, says how many to `keep`.
    """

    def __init__(self, path: Path = Path(), disk: Disk | None = None, *, keep: int = 1) -> None:
        self.path = path
        self.disk = FolderDisk(path) if disk is None else disk
        self.checkpoints = CheckpointStore(self.disk, keep)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the run at a path, and import no module from there; raises `StorageError` without a folder."""
        if not path.is_dir():
            raise StorageError(f"{path}: no such folder; give the folder of a hub's run")
        refuse_modules_in(path)
        return cls(path)

    @property
    def in_use(self) -> bool:
        """Whether a hub is at work in the folder."""
        return is_locked(self.path)

    @property
    def is_known(self) -> bool:
        """Whether a hub has begun a run here, or left its model."""
        try:
            return any((self.path / name).exists() for name in (RECORD_FILE, MODEL_FILE))
        except OSError:  # what reads the folder says what is wrong
            return False

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is anything that a hub could resume; raises `StorageError`."""
        return self.path.is_dir() and any(self.checkpoints.manifests())

    def record(self, kind: type[Kind], remedy: str = "") -> Kind:
        """Return the settings of the last start; raises `FileNotFoundError` and `StorageError`."""
        return read_json(self.path / RECORD_FILE, kind, remedy=remedy)

    def journal(self, after: int = 0) -> JournalReading:
        """Return a reading of the journal's records after a number."""
        return JournalReading(self.disk, after)

    def history(self) -> Rows:
        """Return the history; raises nothing for one that is damaged or missing."""
        return read_rows(self.disk)

    def snapshot(self) -> "RunSnapshot":
        """Return checkpoints and journal as they are at one moment; raises `StorageError`.

        A hub drops what its checkpoints cover. So the journal is opened between two equal looks at them.
        """
        checkpoints = self.checkpoints.manifests()
        for _ in range(ATTEMPTS):
            try:
                journal = FolderSnapshot(self.path, segment_names(self.disk))
            except OSError as error:
                raise StorageError(
                    f"{self.path}: the journal cannot be read: {error.strerror}; fix its rights"
                ) from error
            before, checkpoints = checkpoints, self.checkpoints.manifests()
            if before == checkpoints:
                return RunSnapshot(journal, *checkpoints)
            journal.close()
        raise StorageError(f"{self.path}: changes faster than it can be read; look at a copy")


class JournalPart(msgspec.Struct, frozen=True):
    """Checkpoints, oldest first, from which the journal leads to entry `last`, and why it leads no further."""

    starts: list[tuple[str, Manifest]]
    last: int
    trouble: str

    @property
    def first(self) -> int:
        """The entry of the oldest checkpoint."""
        return self.starts[0][1].journal


class RunSnapshot:
    """A run's checkpoints, newest first, and its journal, which stays open until `close`.

    `unreadable` has the names of checkpoints that cannot be read, and what is wrong with each.
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
        """Return what the journal leads to from the newest checkpoint, and why it leads no further.

        Of the manifest that is returned, version, lineage and count of updates are those after the last entry. The
        entries are read, and nothing is computed again.
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
        """Read the journal from the first of these checkpoints, and again from each it does not lead to.

        The checkpoints come oldest first. The journal leads to one if it has what comes between, and the same
        version there.
        """
        found = []
        while starts:
            versions = {manifest.journal: manifest.version for _, manifest in starts}
            last, trouble = starts[0][1].journal, ""
            try:
                for record in JournalReading(self.journal, last).records():
                    version = read_entry(record.entry).version
                    if versions.get(record.number, version) != version:
                        trouble = f"entry {record.number} does not lead to the checkpoint that was written there"
                        break
                    last = record.number
            except StorageError as error:
                trouble = str(error)
            found.append(JournalPart([start for start in starts if start[1].journal <= last], last, trouble))
            starts = [start for start in starts if start[1].journal > last]
        return found
