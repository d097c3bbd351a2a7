"""Logs events, and detects a disk that falls behind. Part of `HubEngine`."""

from collections.abc import Sequence

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.hub.effects import Discard, HubEffect
from edgeasync.core.hub.events import (
    Heard,
    HubEvent,
    HubReceived,
    HubReceivedMalformed,
    PushArrived,
    Revoked,
    Ticked,
)
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.recovery.log import Log, write_entry
from edgeasync.protocol.messages import Order, StatusRequest, Wake

WAITING_BYTES_MIN = 64 << 20
"""Maximum number of bytes that may wait to be written to the log before the hub refuses updates.

For a large model, the limit is higher.
"""

CHECKPOINT_MODELS = 8
"""Minimum size by which the log grows between two checkpoints, as a multiple of the model's
size.
"""

ANSWERS_PER_DEVICE = 4
"""Maximum number of answers that may wait for the disk, per device of `devices_max`."""

ANSWERS_MIN = 1 << 10


class LogWriter:
    """Writes events to the log, if there is one."""

    def __init__(self, log: Log | None, core: HubCore, model: HubModel) -> None:
        self._log = log
        self._core = core
        self._model = model
        self._waiting_bytes_max = max(WAITING_BYTES_MIN, 4 * core.spec.nbytes)
        self._answers_max = max(ANSWERS_MIN, ANSWERS_PER_DEVICE * core.settings.limits.devices_max)
        since_max = core.settings.checkpoint.journal_bytes_max
        self._since_bytes_max = max(since_max, CHECKPOINT_MODELS * core.spec.nbytes)
        self._covered_bytes = 0
        self.saving = False
        """Whether a checkpoint is being written."""

    @property
    def is_behind(self) -> bool:
        """Whether to refuse updates, because too many bytes wait to be written."""
        return self._log is not None and self._log.bytes_waiting > self._waiting_bytes_max

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the log has grown enough since the last checkpoint to write another one."""
        return self._log is not None and self._log.bytes_appended - self._covered_bytes > self._since_bytes_max

    def overfull(self, answers: int) -> str:
        """Return "" or, if too much waits for the disk, why the hub must accept nothing."""
        if self._log is None:
            return ""
        waiting_bytes = self._log.bytes_waiting
        if answers <= self._answers_max and waiting_bytes <= 2 * self._waiting_bytes_max:
            return ""
        return f"the disk is too slow: {waiting_bytes} bytes wait for it"

    def begin_checkpoint(self) -> int | None:
        """Start a checkpoint.

        If there is a log, return the number of the last entry that the checkpoint covers.
        """
        self.saving = True
        if self._log is None:
            return None
        self._covered_bytes = self._log.bytes_appended
        return self._log.last

    def write(self, event: HubEvent, now_s: float, effects: Sequence[HubEffect], *, at_once: bool) -> None:
        """Append an event that the core has handled, unless it changed nothing.

        If `at_once` is set, the entry is made durable even if no answer waits for it.
        """
        log, session, payload, checksum = self._log, b"", None, None
        if log is None or _is_idle(event, effects):
            return
        if isinstance(event, (PushArrived, HubReceived, Heard, HubReceivedMalformed)):
            member = self._core.members.by_peer(event.peer)
            if member is not None:
                session = member.session
            elif not _is_of_operator(event):
                return
            if isinstance(event, PushArrived) and not _is_dropped(event, effects):
                payload = self._model.payload(event.handle)
                checksum = event.push.checksum  # which `PushIntake` has verified
        log.append(write_entry(event, now_s, effects, self._core.version, session), payload, checksum)
        if at_once:
            log.commit()


def _is_idle(event: HubEvent, effects: Sequence[HubEffect]) -> bool:
    """Return whether an event changed nothing, so that it need not be logged."""
    if isinstance(event, (Ticked, Revoked)):
        return not effects
    if isinstance(event, HubReceivedMalformed):
        return not event.strike or not effects  # further faults in quarantine change nothing
    return isinstance(event, HubReceived) and isinstance(event.message, StatusRequest)


def _is_of_operator(event: HubEvent) -> bool:
    """Return whether the event is an operator's `Wake` or `Order`."""
    return isinstance(event, HubReceived) and isinstance(event.message, Wake | Order)


def _is_dropped(event: PushArrived, effects: Sequence[HubEffect]) -> bool:
    return any(isinstance(effect, Discard) and effect.handle == event.handle for effect in effects)
