"""Keeps the model of a device without a hub: a finite copy of it in memory, and that copy in its file."""

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
"""How long a stopping peer waits for its last model to be written."""

KEEP_MODEL_S = 60.0
"""The least time between two writes of the model."""

COPY_S = 1.0
"""The least time between two copies of the model. An abandoned step takes with it what came after the last one."""


class ModelKeeper:
    """Copies a model now and then if a step has left it finite, and writes the copy more seldom, as `name`'s.

    It copies in the thread that trains and writes in one of its own: a decoding that takes long must not hold a
    write up. Without a `file` it writes nothing. `warn` and `fail` are called in either thread.
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
        self._disk = DiskWatch(warn, "a restart loses what was trained")
        self._worker = Worker("keep", fail)
        self._kept_s = time.monotonic()
        self._copied_s = -math.inf
        self._written_steps = -1
        """The number of steps of the copy that was written last."""
        self._told_diverged = False

    def start(self) -> None:
        """Start the thread that writes."""
        self._worker.start()

    def copy(self, parameters: Vector, steps: int) -> None:
        """Copy the model if that is due; called between two steps."""
        now_s = time.monotonic()
        if now_s >= self._copied_s + COPY_S and self.last_finite.keep(parameters, steps):
            self._copied_s = now_s
            if now_s > self._kept_s + KEEP_MODEL_S:
                self._write_copy()

    def restore(self, parameters: Vector) -> bool:
        """Go back to the copy, and write it, if the last step has left other values than finite ones."""
        if not self.last_finite.restore(parameters):
            return False
        assert self.last_finite.copy is not None
        self._tell_diverged(f"{DIVERGED}: back at the model of step {self.last_finite.copy[1]}")
        self._write_copy()
        return True

    def close(self, parameters: Vector, steps: int) -> None:
        """Write the last model, unless its copy already is; blocks."""
        if not self.last_finite.is_restored:
            self._write(parameters, steps)
        if not self._worker.close(WRITE_S):
            self._warn(f"{self._file}: not written in {WRITE_S:g} s; look at the disk")

    def _write_copy(self) -> None:
        """Write the copy, unless a slow disk has yet to write an earlier one."""
        assert self.last_finite.copy is not None
        vector, steps = self.last_finite.copy
        if self._worker.begun_s is None and self._written_steps != steps:
            self._kept_s, self._written_steps = time.monotonic(), steps
            self._write(vector, steps)

    def _write(self, parameters: Vector, steps: int) -> None:
        """Write a model, or leave the one before if training has diverged."""
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
        """Tell people once that training has diverged."""
        if not self._told_diverged:
            self._warn(sentence)
        self._told_diverged = True
