"""The divergence monitor's alarms and their remedies, such as rollbacks and quarantines. Part of `HubCore`."""

import msgspec

from edgeasync.core.hub.effects import HubEffect, Report
from edgeasync.policies.history import DEVICES_MIN, WINDOW, FleetHistory
from edgeasync.policies.monitor import REDUCTION, Monitor, Observation, Remedy, Scope, Watch
from edgeasync.protocol.messages import Quarantine

KEEP_EVERY_UPDATES = 32
"""Calm updates between two versions that are kept for a rollback; more in a large fleet."""

CAUTION_MIN = 1 / 64
"""Least factor of the hub's learning rate, after however many rollbacks."""

FIRST_RATIO = 4.0
"""An update that nothing could shorten spoilt the model if it is longer than this many times the peak."""

FIRST_UPDATES = 8
"""The first updates are watched again when there are this many, or later."""

RECOVERED_AFTER_KEPT = 8
"""After this many versions kept in a row the learning rate, which a rollback halved, is doubled again."""

_BEGUN: dict[Remedy, str] = {
    "alert": "nothing is changed",
    "increase_frequency": "intervals are halved",
    "reduce_lr": "the hub's learning rate is halved",
    "reduce_local_lr": "the devices' learning rates are halved",
    "rollback": "back to the model kept while all was calm, at half the hub's learning rate",
    "quarantine": "its updates do not count until they are calm again",
}
"""Each remedy in words, for the report of an alarm that begins."""

_ENDED: dict[Remedy, str] = {
    "alert": "nothing was changed",
    "increase_frequency": "intervals are as before",
    "reduce_lr": "the hub's learning rate is as before",
    "reduce_local_lr": "the devices' learning rates are as before",
    "rollback": "the hub's learning rate grows again as versions are kept",
    "quarantine": "its updates count again",
}
"""Each remedy in words, for the report of an alarm that ends."""


class Alarm(msgspec.Struct):
    """An active alarm: its watch, the device at fault and its voter (empty: the fleet), the calm updates since."""

    watch: int
    device_id: str
    remedy: Remedy
    cause: str
    calm: int = 0
    voter: str = ""


class DivergenceState(msgspec.Struct):
    """The durable fields of `DivergenceGuard`.

    The keys of `alarms` are watch and device; those of `causes`, too, with the number of updates in a row that had
    a cause, but not enough for an alarm yet. `caution` is the factor that rollbacks leave of the hub's
    learning rate; it grows again as versions are kept. `counted` has the devices whose updates have counted since
    the start or the last rollback. `first` has the first updates since then, until there are enough to compare;
    then it is `None`. `unbounded` has the devices with an update folded meanwhile that nothing could shorten.
    """

    alarms: dict[tuple[int, str], Alarm] = {}
    rollbacks: int = 0
    calm_since_kept: int = 0
    kept_in_a_row: int = 0
    caution: float = 1.0
    counted: dict[str, None] = {}
    first: list[Observation] | None = []
    unbounded: dict[str, None] = {}
    causes: dict[tuple[int, str], int] = {}


class DivergenceGuard:
    """Shows every update to the monitor's watches, and decides when the hub rolls back.

    What the watches find is reports for people, and whether the hub must roll back.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.state = DivergenceState()
        numbered = list(enumerate(monitor.watch))
        self._watches: dict[Scope, list[tuple[int, Watch]]] = {
            "device": [(number, watch) for number, watch in numbered if watch.scope == "device"],
            "fleet": [(number, watch) for number, watch in numbered if watch.scope == "fleet"],
        }
        self._causes = {scope: [watch.cause for _, watch in watches] for scope, watches in self._watches.items()}
        self._calm_updates = monitor.calm_updates
        self._rolls_back = monitor.rolls_back

    @property
    def learning_rate_factor(self) -> float:
        """The factor that remedies leave of the hub's learning rate."""
        return self.state.caution * (REDUCTION if self.is_active("reduce_lr") else 1.0)

    @property
    def local_learning_rate_factor(self) -> float:
        """The factor by which devices are to multiply their learning rates."""
        return REDUCTION if self.is_active("reduce_local_lr") else 1.0

    def is_active(self, remedy: Remedy) -> bool:
        """Return whether an alarm with this remedy is active."""
        alarms = self.state.alarms
        return bool(alarms) and any(alarm.remedy == remedy for alarm in alarms.values())

    def watch_device(
        self, update: Observation, fleet: FleetHistory, voters_live: int, *, calms: bool = True
    ) -> tuple[list[HubEffect], bool]:
        """Show an update to the watches of devices, before it counts; unless it `calms`, it ends no alarm."""
        reports, begun = self._look(update, fleet, "device", calms=calms)
        if "rollback" in begun:
            return reports, True
        epidemic = self._report_epidemic(voters_live) if len(self.state.alarms) > 1 else []
        return reports + epidemic, bool(epidemic)

    def watch_fleet(self, update: Observation, fleet: FleetHistory) -> tuple[list[HubEffect], bool]:
        """Show an update that will count to the watches of the fleet.

        Once there are enough of the first updates to compare, the watches of devices see those again that nothing
        could shorten.
        """
        reports, begun = self._look(update, fleet, "fleet")
        if "rollback" in begun:
            return reports, True
        if self.state.first is None:
            return reports, False
        spoilt = False
        for one in self._take_first(self.state.first, update, fleet):
            # The usual length may have shrunk since then: the first updates of a model average always do.
            if one.device_id in self.state.unbounded and one.norm > FIRST_RATIO * fleet.lengths.peak:
                again, begun = self._look(one, fleet, "device", calms=False, at_once=True)
                reports += again
                spoilt = spoilt or not begun.isdisjoint(("quarantine", "rollback"))
                if one is not update and one.device_id not in self.state.counted:
                    self._end_alarms(one.device_id)  # it is gone: nobody would be calm for it
        return reports, self._rolls_back and spoilt

    def quarantine_of(self, device_id: str) -> Quarantine | None:
        """Return why the hub rejects a device's updates and how many calm ones end that; `None` if it does not."""
        if not self.state.alarms:
            return None  # the usual case, with every update
        longest: Quarantine | None = None
        for number, _ in self._watches["device"]:
            alarm = self.state.alarms.get((number, device_id))
            if alarm is not None and alarm.remedy in ("quarantine", "rollback"):
                left = self._calm_updates - alarm.calm
                if longest is None or left > longest.calm_updates:
                    longest = Quarantine(alarm.cause, left)
        return longest

    def note_unbounded(self, device_id: str) -> None:
        """Note that an update of the device was folded with whatever length it has."""
        if self.state.first is not None:
            self.state.unbounded[device_id] = None

    def forget(self, device_id: str) -> None:
        """Forget a device that is gone, with its alarms; its first updates may still make the hub go back."""
        self._end_alarms(device_id)
        self.state.counted.pop(device_id, None)

    def count_folded(self, updates: int, members: int) -> bool:
        """Count updates that were folded; return whether to keep their version for a rollback."""
        state = self.state
        # Updates of a device in quarantine do not reach the model.
        alarmed = bool(state.alarms) and any(alarm.remedy != "quarantine" for alarm in state.alarms.values())
        state.calm_since_kept = 0 if alarmed else state.calm_since_kept + updates
        # A device that trains from a spoilt version shows it only with its next update.
        if not self._rolls_back or state.calm_since_kept < max(KEEP_EVERY_UPDATES, 2 * members):
            return False
        state.calm_since_kept = 0
        state.kept_in_a_row += 1
        if state.kept_in_a_row % RECOVERED_AFTER_KEPT == 0:
            state.caution = min(1.0, state.caution / REDUCTION)
        return True

    def rolled_back(self) -> None:
        """Start over with more caution: all observations were of a model that is gone."""
        state = self.state
        state.rollbacks += 1
        state.calm_since_kept = state.kept_in_a_row = 0
        state.caution = max(CAUTION_MIN, state.caution * REDUCTION)
        state.counted.clear()
        state.unbounded.clear()
        state.causes.clear()
        state.first = []

    def _look(
        self, update: Observation, fleet: FleetHistory, scope: Scope, *, calms: bool = True, at_once: bool = False
    ) -> tuple[list[HubEffect], set[Remedy]]:
        """Show an update to the watches of a scope; return reports, and the remedies that begin.

        `at_once` begins an alarm with its first cause.

        An alarm is reported when it begins and when it ends, not with every update. It ends only after
        `calm_updates` in a row, so that it does not begin and end with each outlier.
        """
        reports: list[HubEffect] = []
        begun: set[Remedy] = set()
        if not self.state.alarms and not self.state.causes:
            for cause_of in self._causes[scope]:
                if cause_of(update, fleet) is not None:
                    break
            else:
                return reports, begun  # the usual case, with every update
        for number, watch in self._watches[scope]:
            cause = watch.cause(update, fleet)
            report = self._follow(number, watch, cause, update, calms=calms, at_once=at_once)
            if report is not None:
                reports.append(report)
                if report.event == "alarm":
                    begun.add(watch.remedy)
        return reports, begun

    def _follow(
        self, number: int, watch: Watch, cause: str | None, update: Observation, *, calms: bool, at_once: bool
    ) -> Report | None:
        """Begin, continue or end the alarm of a watch; return a report if it begins or ends."""
        alarms, causes = self.state.alarms, self.state.causes
        device_id = update.device_id if watch.scope == "device" else ""
        key = number, device_id
        alarm = alarms.get(key)
        if cause is None:
            if not calms:
                return None
            if alarm is None:
                causes.pop(key, None)
                return None
            alarm.calm += 1
            if alarm.calm < self._calm_updates:
                return None
            del alarms[key]
            return Report("calm", device_id, f"over: {alarm.cause}; {_ENDED[alarm.remedy]}")
        if alarm is not None:
            alarm.calm, alarm.cause = 0, cause
            return None
        in_a_row = causes.pop(key, 0) + 1
        needed = watch.count_max * (update.lateness if watch.patient else 1.0)
        if in_a_row < needed and not at_once:
            causes[key] = in_a_row
            return None
        alarms[key] = Alarm(number, device_id, watch.remedy, cause, voter=update.voter if device_id else "")
        return Report("alarm", device_id, f"{cause}; {_BEGUN[watch.remedy]}")

    def _end_alarms(self, device_id: str) -> None:
        for number, _ in self._watches["device"]:
            self.state.alarms.pop((number, device_id), None)
            self.state.causes.pop((number, device_id), None)

    def _report_epidemic(self, voters_live: int) -> list[HubEffect]:
        """Return a report if more than half of the voters have a device in quarantine: the model is at fault.

        Devices whose updates never counted may have been broken from the start. They are included only if at least
        `DEVICES_MIN` voters are concerned, and only before the first rollback.
        """
        if not self._rolls_back:
            return []
        counted = self.state.counted
        devices = {a.device_id: a.voter for a in self.state.alarms.values() if a.remedy == "quarantine"}
        if self.state.rollbacks or len(set(devices.values())) < DEVICES_MIN:
            devices = {device_id: voter for device_id, voter in devices.items() if device_id in counted}
        voters = len(set(devices.values()))
        if voters < 2 or 2 * voters <= voters_live:
            return []
        for device_id in devices:
            self._end_alarms(device_id)
        fault = f"{voters} of {voters_live} devices are in quarantine: the model is at fault"
        return [Report("alarm", detail=f"{fault}; {_BEGUN['rollback']}")]

    def _take_first(self, first: list[Observation], update: Observation, fleet: FleetHistory) -> list[Observation]:
        """Keep one of the first updates; return all of them, once, when there are enough to compare."""
        first.append(update)
        if len(first) < FIRST_UPDATES or (len(fleet.lengths) < DEVICES_MIN and len(first) < WINDOW):
            return []
        self.state.first = None
        return first
