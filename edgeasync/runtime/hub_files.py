"""Write a hub's checkpoints, its latest model and its best model to the run's folder."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.effects import HubReport
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.recovery.state import HubState
from edgeasync.durable.files import FolderLock
from edgeasync.durable.run import HubRun
from edgeasync.durable.run_folder import BEST_FILE, MODEL_FILE, RECORD_FILE
from edgeasync.errors import StorageError
from edgeasync.graphs.graph_model import keep_file
from edgeasync.graphs.model_file import read_header, save_model
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol.messages import ModelVersion
from edgeasync.runtime.hub_threads import CLOSE_S, HubThreads, Thread

OnSaved = Callable[[int], None]
"""Called on the event loop after a checkpoint, with the number of its last journal entry.

The number is 0 if the checkpoint could not be written.
"""


class HubFiles:
    """Writes checkpoints and models in the save thread. Call its methods on the event loop."""

    def __init__(
        self,
        folder: FolderLock,
        run: HubRun,
        spec: ParameterSpec,
        threads: HubThreads,
        *,
        report: Callable[[HubReport], None],
    ) -> None:
        self.version_saved = 0
        """The model's version in the latest checkpoint."""
        self.unwritten = ""
        """Why the last checkpoint could not be written; empty if it was written."""
        self.unsaved: StorageError | None = None
        """The error if the last model could not be written at the end of the hub, otherwise `None`."""
        self.folder = folder
        self._run = run
        self._spec = spec
        self._threads = threads
        self._report = report
        self._write_best: Callable[[], None] | None = None

    @property
    def model(self) -> Path:
        """The path of the latest saved model."""
        return self.folder.path / MODEL_FILE

    @property
    def best(self) -> Path:
        """The path of the best version so far."""
        return self.folder.path / BEST_FILE

    def begin(self, record: bytes | None) -> None:
        """Write the files that a recovered or new run lacks; raises `StorageError` or `OSError`."""
        if record is not None:
            keep_file(self.folder.path / RECORD_FILE, record)
        if not self.model.exists():
            self.save_model(self._run.model.current, self._run.core.lineage)
        self._put_best_aside()

    def save_model(self, snapshot: Snapshot, lineage: str) -> None:
        """Write the model file. Raises `StorageError`, or `OSError` if the folder was moved."""
        self.folder.check()
        save_model(self.model, self._spec, snapshot.vector, lineage=lineage, version=snapshot.number)

    def _put_best_aside(self) -> None:
        """Rename the best version's file if the recovered run does not contain that version."""
        try:
            kept = read_header(self.best)
        except StorageError:
            return
        core = self._run.core
        ancestry, found = core.policy_engine.state.ancestry, ModelVersion(kept.lineage, kept.version)
        if found.number > core.version or not ancestry.knows(found):
            with contextlib.suppress(OSError):
                self.best.rename(self.best.with_name(f"{BEST_FILE}.aside"))

    def save(self, state: HubState, saved: OnSaved, *, last: bool) -> None:
        """Write a checkpoint and the model in the save thread, then call `saved`."""

        def work() -> None:
            what, covered, trouble = "checkpoint", 0, ""
            try:
                covered = self._run.save(state, time.time())
                what = "model"
                self.save_model(state.snapshot, state.lineage)
            except (OSError, StorageError) as error:
                trouble = f"cannot write the {what}: {error}"
            if trouble and last:
                self.unsaved = StorageError(f"{self.model.parent}: {trouble} (while the hub was stopping)")
            version = self.version_saved if what == "checkpoint" and trouble else state.snapshot.number
            self._threads.hand_over(covered, lambda covered: done(covered, version, trouble))

        def done(covered: int, version: int, trouble: str) -> None:
            self.version_saved, self.unwritten = version, trouble
            if trouble:
                self._report(HubReport("warning", detail=trouble))
            saved(covered)

        self._threads.submit("save", work)

    def save_now(self, state: HubState) -> None:
        """Write a checkpoint and the model in this thread; raises `StorageError` or `OSError`."""
        self.folder.check()
        self._run.save(state, time.time())
        self.save_model(state.snapshot, state.lineage)

    def save_best(self, snapshot: Snapshot, lineage: str, evaluation: Evaluated) -> None:
        """Write the best version in the save thread. It replaces a best version that is still queued."""

        def write() -> None:
            save_model(
                self.best,
                self._spec,
                snapshot.vector,
                lineage=lineage,
                version=snapshot.number,
                evaluation=evaluation,
            )

        def work() -> None:
            newest, self._write_best = self._write_best, None
            assert newest is not None
            try:
                self.folder.check()
                newest()
            except (OSError, StorageError) as error:
                self._threads.hand_over(HubReport("warning", detail=str(error)), self._report)

        waiting, self._write_best = self._write_best, write
        if waiting is None:
            self._threads.submit("save", work)

    async def close(self) -> None:
        """Wait until everything is written to disk; set `unsaved` if something could not be written."""
        last: dict[Thread, str] = {"journal": "journal", "save": "last checkpoint"}
        for thread, what in last.items():
            if not await self._threads.close(thread):
                self.unsaved = StorageError(
                    f"{self.model.parent}: the {what} was not written within {CLOSE_S:g} s; check the disk"
                )
