"""Save a peer's model as a finite copy in memory, and write this copy to a file."""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from edgeasync.errors import StorageError
from edgeasync.graphs.model_file import DIVERGED, check_finite, save_model
from edgeasync.host.disk_watch import DiskWatch
from edgeasync.host.worker import Worker
from edgeasync.parameters import ParameterSpec, Vector
from edgeasync.training.last_finite import LastFinite

WRITE_S = 60.0
"""Seconds that a stopping peer waits until its last model is written."""

KEEP_MODEL_S = 60.0
"""Minimum seconds between two writes of the model."""

COPY_S = 1.0
"""Minimum seconds between two copies. If a step is abandoned, training since the last copy is lost."""


class ModelKeeper:
    """Copies the model in memory if all its values are finite, and writes the copy to a file less often.

    It copies the model in the training thread. It writes in its own thread, so that decoding a long
    message does not delay a write. If `file` is `None`, it writes nothing. The file records `name`
    as its lineage. `warn` and `fail` may be called in both threads.
    """

    def __init__(
        self,
        file: Path | None,
        spec: ParameterSpec,
        name: str,
        *,
        warn: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.last_finite = LastFinite()
        self._file = file
        self._spec, self._name = spec, name
        self._warn = warn
        self._disk = DiskWatch(warn, "a restart loses the training since the last write")
        self._worker = Worker("keep", fail)
        self._kept_s = time.monotonic()
        self._copied_s = -math.inf
        self._written_steps = -1
        """The number of local steps of the copy that was last written."""
        self._told_diverged = False

    def start(self) -> None:
        """Start the writing thread."""
        self._worker.start()

    def copy(self, parameters: Vector, steps: int) -> None:
        """Copy the model if a copy is due. Called between two steps."""
        now_s = time.monotonic()
        if now_s >= self._copied_s + COPY_S and self.last_finite.keep(parameters, steps):
            self._copied_s = now_s
            if now_s > self._kept_s + KEEP_MODEL_S:
                self._write_copy()

    def restore(self, parameters: Vector) -> bool:
        """If the model is not finite, restore the last copy and write it to the file.

        Return whether the model was restored.
        """
        if not self.last_finite.restore(parameters):
            return False
        assert self.last_finite.copy is not None
        self._tell_diverged(f"{DIVERGED}: restored the model of step {self.last_finite.copy[1]}")
        self._write_copy()
        return True

    def close(self, parameters: Vector, steps: int) -> None:
        """Write the last model, unless it is already written. Blocks."""
        if not self.last_finite.is_restored:
            self._write(parameters, steps)
        if not self._worker.close(WRITE_S):
            self._warn(f"{self._file}: not written within {WRITE_S:g} s; check the disk")

    def _write_copy(self) -> None:
        """Write the copy, unless an earlier write is still running."""
        assert self.last_finite.copy is not None
        vector, steps = self.last_finite.copy
        if self._worker.begun_s is None and self._written_steps != steps:
            self._kept_s, self._written_steps = time.monotonic(), steps
            self._write(vector, steps)

    def _write(self, parameters: Vector, steps: int) -> None:
        """Write a model, or leave the file unchanged if training has diverged."""
        file = self._file
        if file is None:
            return

        def work() -> None:
            try:
                check_finite(file, parameters)
            except StorageError as error:
                self._tell_diverged(str(error))
                return
            save = partial(save_model, file, self._spec, parameters, lineage=self._name, version=steps)
            self._disk.write(save)

        self._worker.submit(work)

    def _tell_diverged(self, sentence: str) -> None:
        """Warn once that training has diverged."""
        if not self._told_diverged:
            self._warn(sentence)
        self._told_diverged = True
