"""Store an agent's unanswered update, model and trainer state on disk, to survive a power cut."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from edgeasync.core.arrays.spool import HeldModel, Spool, TrainerState
from edgeasync.errors import ProtocolError, StorageError
from edgeasync.host.disk_watch import DiskWatch
from edgeasync.training.trainer import CoroutineTrainer, ResumableTrainer, Trainer

if TYPE_CHECKING:
    from edgeasync.durable.spool_file import SpoolFile


class SpoolKeeper:
    """Reads the spool that was written before a restart, and writes this start's `DeviceSpool`.

    If a file cannot be read or written, it only calls `warn` with a message. The agent calls all
    methods in the training thread. Once that thread has ended, it may call `keep_model` in another
    thread.
    """

    def __init__(self, spool: "SpoolFile", warn: Callable[[str], None]) -> None:
        self._spool = spool
        self._warn = warn
        self._disk = DiskWatch(warn, "a power cut loses the unanswered update")
        self._trainer: Trainer | CoroutineTrainer | None = None
        self._trainer_state: TrainerState | None = None

    def recall(self) -> tuple[Spool | None, HeldModel | None]:
        """Return the update and model on disk, and load the trainer's state for `restore`."""
        held = self._spool.read_model()
        try:
            spool = self._spool.read()
        except StorageError as error:
            self._warn(str(error))
        except ProtocolError as error:
            self.put_aside(str(error))
        else:
            self._trainer_state = None if spool is None else spool.trainer
            return spool, held
        return None, held

    def restore(self, trainer: Trainer | CoroutineTrainer) -> None:
        """Restore the loaded state in a new trainer, and save that trainer's state from now on."""
        self._trainer = trainer
        if self._trainer_state is not None and isinstance(trainer, ResumableTrainer):
            try:
                trainer.restore(self._trainer_state)
            except ValueError as error:
                self._warn(f"the trainer's stored state cannot be restored, so it starts from scratch: {error}")
        self._trainer_state = None

    def keep(self, spool: Spool) -> None:
        """Write an update and the trainer's state to disk."""
        if isinstance(self._trainer, ResumableTrainer):
            spool = msgspec.structs.replace(spool, trainer=self._trainer.state())
        self._disk.write(lambda: self._spool.write(spool))

    def keep_model(self, held: HeldModel) -> None:
        """Write the model to disk.

        A failure is not reported here, because `keep` warns about a failing disk. After a failure,
        the next start fetches the whole model from the hub.
        """
        with contextlib.suppress(StorageError):
            self._spool.write_model(held)

    def put_aside(self, reason: str) -> None:
        """Rename the spool of an earlier start, warn with the reason, and discard the trainer's state."""
        self._trainer_state = None
        try:
            aside = self._spool.put_aside()
        except StorageError as error:
            self._warn(str(error))
        else:
            self._warn(f"{aside}: {reason}; renamed the spool to this, and this device starts without it")
