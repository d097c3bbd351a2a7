"""What an agent has on disk of its unanswered work, its model and its trainer: it outlives a power cut."""

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
    """Reads what an earlier start kept, and writes what this one would lose with the power: a `DeviceSpool`.

    Whatever is wrong with the files costs a sentence, which is given to `warn`, and no more. The agent calls all
    methods in the thread that trains, and `keep_model` in another one as well, once that has ended.
    """

    def __init__(self, spool: "SpoolFile", warn: Callable[[str], None]) -> None:
        self._spool = spool
        self._warn = warn
        self._disk = DiskWatch(warn, "a power cut loses the unanswered update")
        self._trainer: Trainer | CoroutineTrainer | None = None
        self._trainer_state: TrainerState | None = None

    def recall(self) -> tuple[Spool | None, HeldModel | None]:
        """Return the update and the model that an earlier start kept; hold the trainer's state for `restore`."""
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
        """Let a new trainer continue where that of the earlier start was, if it can; keep its state as well."""
        self._trainer = trainer
        if self._trainer_state is not None and isinstance(trainer, ResumableTrainer):
            try:
                trainer.restore(self._trainer_state)
            except ValueError as error:
                self._warn(f"the trainer begins from scratch: {error}")
        self._trainer_state = None

    def keep(self, spool: Spool) -> None:
        """Write an update and the trainer's state."""
        if isinstance(self._trainer, ResumableTrainer):
            spool = msgspec.structs.replace(spool, trainer=self._trainer.state())
        self._disk.write(lambda: self._spool.write(spool))

    def keep_model(self, held: HeldModel) -> None:
        """Write the model. If the disk fails, `keep` tells that, and the next start fetches a whole model."""
        with contextlib.suppress(StorageError):
            self._spool.write_model(held)

    def put_aside(self, reason: str) -> None:
        """Rename what an earlier start kept, tell why, and let the trainer begin from scratch."""
        self._trainer_state = None
        try:
            aside = self._spool.put_aside()
        except StorageError as error:
            self._warn(str(error))
        else:
            self._warn(f"{aside}: {reason}; put aside, and this device begins from scratch")
