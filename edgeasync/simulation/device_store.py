"""What of a simulated device outlives a power cut."""

from collections.abc import Callable

import msgspec

from edgeasync.core.arrays.spool import HeldModel, Spool, TrainerState
from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.simulation.training import SimulatedTraining
from edgeasync.training.trainer import ResumableTrainer


class DeviceStore:
    """Training graphs, the count of the day's bytes, and as a `DeviceSpool` the update without an answer."""

    def __init__(self, training: SimulatedTraining, warn: Callable[[str], None]) -> None:
        self.graphs: dict[str, bytes] = {}
        self.quota: QuotaRecord | None = None
        self.spool: Spool | None = None
        self.held: HeldModel | None = None
        self._training = training
        self._warn = warn
        self._trainer_state: TrainerState | None = None

    def recall(self) -> tuple[Spool | None, HeldModel | None]:
        """Return the update and the model that were kept; hold the trainer's state for `restore`."""
        if self.spool is not None:
            self._trainer_state = self.spool.trainer
        return self.spool, self.held

    def restore(self) -> None:
        """Let the trainer resume from what was kept."""
        trainer = self._training.trainer
        if self._trainer_state is not None and isinstance(trainer, ResumableTrainer):
            trainer.restore(self._trainer_state)
        self._trainer_state = None

    def keep(self, spool: Spool) -> None:
        """Keep a copy."""
        trainer = self._training.trainer
        state = trainer.state() if isinstance(trainer, ResumableTrainer) else {}
        self.spool = Spool(
            spool.model,
            spool.push,
            bytes(spool.payload),
            None if spool.residual is None else spool.residual.copy(),
            {name: array.copy() for name, array in state.items()},
        )

    def keep_model(self, held: HeldModel) -> None:
        """Keep a copy."""
        self.held = msgspec.structs.replace(held, values=held.values.copy())

    def put_aside(self, reason: str) -> None:
        """Forget what was kept."""
        self.spool = self._trainer_state = None
        self._warn(reason)
