"""What the hub's engine writes down of every event, and when that is too much. Part of `HubEngine`."""

from collections.abc import Sequence

from edgeasync.core.arrays.hub_model import Model
from edgeasync.core.hub.effects import Discard, HubEffect
from edgeasync.core.hub.events import Heard, HubEvent, Malformed, PushArrived, Received, Revoked, Ticked
from edgeasync.core.hub.machine import HubCore
from edgeasync.core.recovery.log import Log, write_entry
from edgeasync.protocol.messages import StatusRequest

WAITING_BYTES_MIN = 64 << 20
"""So much of the log may wait for the disk before updates are refused for now; more with a large model."""

CHECKPOINT_MODELS = 8
"""A checkpoint is a few models long: none is written before so many models' bytes were."""

ANSWERS_PER_DEVICE = 4
"""So many answers may wait for the disk for every device that there may be."""

ANSWERS_MIN = 1 << 10


class LogWriter:
    """Writes to the log, if there is one."""

    def __init__(self, log: Log | None, core: HubCore, model: Model) -> None:
        self._log = log
        self._core = core
        self._model = model
        self._waiting_bytes_max = max(WAITING_BYTES_MIN, 4 * core.spec.nbytes)
        self._answers_max = max(ANSWERS_MIN, ANSWERS_PER_DEVICE * core.settings.limits.devices_max)
        since_max = core.settings.checkpoint.journal_bytes_max
        self._since_bytes_max = max(since_max, CHECKPOINT_MODELS * core.spec.nbytes)
        self._covered_bytes = 0

    @property
    def is_behind(self) -> bool:
        """Whether so much waits for the disk that no more updates should."""
        return self._log is not None and self._log.bytes_waiting > self._waiting_bytes_max

    @property
    def wants_checkpoint(self) -> bool:
        """Whether so much was written since the last checkpoint that it is time for one."""
        return self._log is not None and self._log.bytes_appended - self._covered_bytes > self._since_bytes_max

    def overfull(self, answers: int) -> str:
        """Return why nothing more should be taken in, while this many answers wait: else memory would run full."""
        if self._log is None:
            return ""
        waiting_bytes = self._log.bytes_waiting
        if answers <= self._answers_max and waiting_bytes <= 2 * self._waiting_bytes_max:
            return ""
        return f"{waiting_bytes} bytes wait for a disk that does not keep up"

    def begin_checkpoint(self) -> int | None:
        """Note that a checkpoint is made; return the number of the last entry it covers, if there is a log."""
        if self._log is None:
            return None
        self._covered_bytes = self._log.bytes_appended
        return self._log.last

    def write(self, event: HubEvent, now_s: float, effects: Sequence[HubEffect]) -> None:
        """Append an event that the core has taken in, unless it changed nothing: of strangers nothing is noted."""
        log, session, payload = self._log, b"", None
        if log is None or _is_idle(event, effects):
            return
        if isinstance(event, Received | PushArrived | Heard | Malformed):
            if (member := self._core.members.by_peer(event.peer)) is None:
                return
            session = member.session
            if isinstance(event, PushArrived) and not _is_dropped(event, effects):
                payload = self._model.payload(event.handle)
        log.append(write_entry(event, now_s, effects, self._core.version, session), payload)


def _is_idle(event: HubEvent, effects: Sequence[HubEffect]) -> bool:
    """Whether an event changed nothing, whoever it came from: it would only wear out the disk."""
    if isinstance(event, Ticked | Revoked):
        return not effects
    if isinstance(event, Malformed):
        return not event.strike or not effects  # of a device in quarantine nothing more is noted
    return isinstance(event, Received) and isinstance(event.message, StatusRequest)


def _is_dropped(event: PushArrived, effects: Sequence[HubEffect]) -> bool:
    return any(isinstance(effect, Discard) and effect.handle == event.handle for effect in effects)
