"""Tracks what a device has saved to disk, to limit the loss from a power cut."""

import math

import msgspec

from edgeasync.core.arrays.device_model import DeviceModel
from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.core.device.work_cycle import WorkCycle
from edgeasync.core.engine.device_shell import DeviceSpool
from edgeasync.protocol.messages import Push

KEEP_MODEL_S = 60.0
"""Minimum time between two writes of the model, because the model is large, and an older copy is
useful as well.
"""


class KeptWork:
    """The work saved before a restart, and the update on disk. Part of `DeviceEngine`.

    Without a `spool`, no update is written.
    """

    def __init__(self, spool: DeviceSpool | None) -> None:
        self.spool = spool
        self.recalled: Spool | None = None
        """The update from before a restart, until it is answered."""
        self._held: HeldModel | None = None
        self._kept_seq = self._keeping_seq = 0
        self._keep_model_at_s = -math.inf

    def recall(self, spool: Spool | None, held: HeldModel | None, work: WorkCycle) -> None:
        """Resume the work with the update and the model from before a restart."""
        self._held = held
        if held is not None:
            work.held.recall(held.model, held.version, held.checksum)
        if spool is None:
            return
        self.recalled, self._kept_seq = spool, spool.push.seq
        push = spool.push
        if held is None or (held.version, held.checksum) != (push.base, push.held_checksum):
            push = msgspec.structs.replace(push, held_checksum=None)
        work.recall(push, spool.model)

    def restore(self, model: DeviceModel, key: ModelKey) -> None:
        """Restore the model from before a restart if it is the hub's model.

        Raises `ValueError` if its length is wrong.
        """
        held, self._held = self._held, None
        if held is not None and held.model == key:
            model.restore_base(held)

    def forget(self) -> None:
        """Drop the update on disk, because another one replaces it or it was put aside."""
        self.recalled, self._kept_seq = None, 0

    def needs_write(self, push: Push) -> bool:
        """Return whether an update must be written to disk before it is sent."""
        return self.spool is not None and self._kept_seq != push.seq

    def begin_write(self, push: Push) -> bool:
        """Record that an update is being written.

        Return false if a write with this number is already in progress.
        """
        begins, self._keeping_seq = self._keeping_seq != push.seq, push.seq
        return begins

    def end_write(self, push: Push) -> None:
        """Record that an update is on disk."""
        self._keeping_seq, self._kept_seq = 0, push.seq

    def is_model_due(self, now_s: float) -> bool:
        """Return whether to write the model, because the copy on disk is old."""
        is_due = self.spool is not None and now_s >= self._keep_model_at_s
        if is_due:
            self._keep_model_at_s = now_s + KEEP_MODEL_S
        return is_due
