"""What the divergence monitor's alarms lead to: rollbacks, versions to return to, caution. Part of `HubCore`."""

from collections.abc import Sequence

import msgspec

from edgeasync.core.hub.alarms import Alarm, AlarmBoard, Change
from edgeasync.core.hub.effects import HubEffect, Report
from edgeasync.policies.history import WINDOW, FleetHistory
from edgeasync.policies.monitor import DEVICES_MIN, REDUCTION, Monitor, Observation, Scope
from edgeasync.protocol.messages import Quarantine

KEEP_EVERY_UPDATES = 32
"""Calm updates between two versions kept to return to; more in a large fleet."""

CAUTION_MIN = 1 / 64
"""Part of the server's learning rate that is left however often the hub goes back."""

FIRST_UPDATES = 8
"""Updates after which the first are looked at again, at the earliest."""

RECOVERED_AFTER_KEPT = 8
"""Versions kept in a row after which the learning rate that a rollback halved is doubled again."""

_REMEDIES = {
    "alert": ("nothing was changed", "nothing is changed"),
    "increase_frequency": ("intervals are as before", "intervals are halved"),
    "reduce_lr": ("the server's learning rate is as before", "the server's learning rate is halved"),
    "rollback": (
        "the server's learning rate grows again as versions are kept",
        "back to the model kept while all was calm, at half the server's learning rate",
    ),
    "quarantine": ("its updates count again", "its updates do not count until they are calm again"),
}


class DivergenceGuardState(msgspec.Struct):
    """What is durable of `DivergenceGuard`; sets in order."""

    alarms: list[Alarm]
    rollbacks: int
    calm_since_kept: int
    kept_in_a_row: int
    caution: float
    counted: list[str]
    first: list[Observation] | None


class DivergenceGuard:
    """Looks at every update through the monitor's watches, and says when the hub is to go back."""

    def __init__(self, monitor: Monitor) -> None:
        self.alarms = AlarmBoard(monitor.watch, monitor.calm_updates)
        self.rollbacks = 0
        self._calm_updates = monitor.calm_updates
        self._rolls_back = monitor.rolls_back
        self._calm_since_kept = self._kept_in_a_row = 0
        self._caution = 1.0
        """What rollbacks leave of the server's learning rate; it grows again while versions are kept."""
        self._counted: set[str] = set()
        """Devices whose updates have counted since the start, or since the last rollback."""
        self._first: list[Observation] | None = []
        """The first updates, and those after a rollback, until there are enough to compare them."""

    def dump_state(self) -> DivergenceGuardState:
        """Return the durable state, to be written down at once: it is not a copy."""
        return DivergenceGuardState(
            alarms=self.alarms.dump_state(),
            rollbacks=self.rollbacks,
            calm_since_kept=self._calm_since_kept,
            kept_in_a_row=self._kept_in_a_row,
            caution=self._caution,
            counted=sorted(self._counted),
            first=self._first,
        )

    def load_state(self, state: DivergenceGuardState) -> None:
        """Go on from a durable state, which is this object's from then on."""
        self.alarms.load_state(state.alarms)
        self.rollbacks = state.rollbacks
        self._calm_since_kept = state.calm_since_kept
        self._kept_in_a_row = state.kept_in_a_row
        self._caution = state.caution
        self._counted = set(state.counted)
        self._first = state.first

    @property
    def learning_rate_factor(self) -> float:
        """What remedies leave of the server's learning rate."""
        return self._caution * (REDUCTION if self.alarms.active("reduce_lr") else 1.0)

    def watch_device(
        self, update: Observation, fleet: FleetHistory, devices_live: int, effects: list[HubEffect]
    ) -> bool:
        """Let the watches of devices see an update, before it counts; return whether the hub is to go back."""
        return self._look(update, fleet, "device", effects) or self._is_epidemic(devices_live, effects)

    def watch_fleet(self, update: Observation, fleet: FleetHistory, effects: list[HubEffect]) -> bool:
        """Let the watches of the fleet see an update that is to count; return whether the hub is to go back."""
        return self._look(update, fleet, "fleet", effects) or self._look_again(update, fleet, effects)

    def shuts_out(self, device_id: str) -> bool:
        """Return whether the device's updates do not count for now."""
        return self.quarantine_of(device_id) is not None

    def quarantine_of(self, device_id: str) -> Quarantine | None:
        """Return why the device's updates do not count, and how many calm ones end that; `None` if they do."""
        longest: Quarantine | None = None
        for alarm in self.alarms:
            if alarm.device_id == device_id and alarm.remedy in ("quarantine", "rollback"):
                left = self._calm_updates - alarm.calm
                if longest is None or left > longest.calm_updates:
                    longest = Quarantine(alarm.cause, left)
        return longest

    def count(self, device_id: str) -> None:
        """Note that an update of the device counts."""
        self._counted.add(device_id)

    def forget(self, device_id: str) -> None:
        """Drop what is noted of a device that is gone."""
        self.alarms.forget(device_id)
        self._counted.discard(device_id)

    def count_folded(self, updates: int, members: int) -> bool:
        """Count updates that were folded; return whether the version they made is one to return to later."""
        # What a device in quarantine sends does not reach the model.
        alarmed = any(alarm.remedy != "quarantine" for alarm in self.alarms)
        self._calm_since_kept = 0 if alarmed else self._calm_since_kept + updates
        # A device that learns from a spoilt version says so one exchange later.
        if not self._rolls_back or self._calm_since_kept < max(KEEP_EVERY_UPDATES, 2 * members):
            return False
        self._calm_since_kept = 0
        self._kept_in_a_row += 1
        if self._kept_in_a_row % RECOVERED_AFTER_KEPT == 0:
            self._caution = min(1.0, self._caution / REDUCTION)
        return True

    def rolled_back(self) -> None:
        """Begin anew, with more caution: what was seen was seen of a model that is no more."""
        self.rollbacks += 1
        self._calm_since_kept = self._kept_in_a_row = 0
        self._caution = max(CAUTION_MIN, self._caution * REDUCTION)
        self._counted.clear()
        self._first = []

    def _look(self, update: Observation, fleet: FleetHistory, scope: Scope, effects: list[HubEffect]) -> bool:
        changes = self.alarms.look(update, fleet, scope)
        self._report(changes, effects)
        return any(change.begun and change.alarm.remedy == "rollback" for change in changes)

    def _is_epidemic(self, devices_live: int, effects: list[HubEffect]) -> bool:
        """Return whether more than half of the devices fell into quarantine: then the model is at fault.

        Those whose updates never counted may have been broken from the start: they are believed only if there are
        several, and only once.
        """
        devices = {alarm.device_id for alarm in self.alarms if alarm.remedy == "quarantine"}
        if self.rollbacks or len(devices) < DEVICES_MIN:
            devices &= self._counted
        if not self._rolls_back or len(devices) < 2 or 2 * len(devices) <= devices_live:
            return False
        for device_id in devices:
            self.alarms.forget(device_id)
        detail = f"{len(devices)} of {devices_live} devices are in quarantine: the model is at fault"
        effects.append(Report("alarm", detail=f"{detail}; {_REMEDIES['rollback'][True]}"))
        return True

    def _look_again(self, update: Observation, fleet: FleetHistory, effects: list[HubEffect]) -> bool:
        """Look again at the first updates once they can be compared: an alarming one has spoilt the model."""
        if self._first is None:
            return False
        self._first.append(update)
        if len(self._first) < FIRST_UPDATES or (len(fleet.norms) < DEVICES_MIN and len(self._first) < WINDOW):
            return False
        first, self._first = self._first, None
        changes = [change for update in first for change in self.alarms.look(update, fleet, "device")]
        self._report(changes, effects)
        spoilt = any(change.begun and change.alarm.remedy in ("quarantine", "rollback") for change in changes)
        return self._rolls_back and spoilt

    def _report(self, changes: Sequence[Change], effects: list[HubEffect]) -> None:
        for change in changes:
            alarm = change.alarm
            detail = f"{alarm.cause}; {_REMEDIES[alarm.remedy][change.begun]}"
            effects.append(
                Report("alarm", alarm.device_id, detail)
                if change.begun
                else Report("calm", alarm.device_id, f"over: {detail}")
            )
