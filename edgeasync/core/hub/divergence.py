"""Alarms, rollbacks and operators' orders. Part of `HubCore`.

An alarm never excludes a device; only an operator can. By norms and losses alone, an honest device
with unusual data looks like a corrupted one. If alarms excluded such devices, the model would fit
their data worse and worse.
"""

from collections.abc import Collection, Container, Mapping
from typing import Any, Literal

import msgspec

from edgeasync.core.hub.effects import HubEffect, HubReport
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.measurements.medians import WINDOW, add_recent, factor
from edgeasync.measurements.votes import DEVICES_MIN
from edgeasync.policies.monitor import REDUCTION, Detector, Evidence, Monitor, Observation, Remedy, Scope
from edgeasync.protocol.status import ActiveAlarm, AlarmCause, EndedAlarm

KEEP_EVERY_UPDATES = 32
"""Minimum number of updates without an alarm between two versions that are kept for a rollback. It
is larger in large fleets.
"""

CAUTION_MIN = 1 / 64
"""Minimum factor by which rollbacks scale the hub's learning rate."""

FIRST_RATIO = 4.0
"""If the norm of an unclipped first update exceeds this multiple of the peak norm, the update
corrupted the model.
"""

FIRST_UPDATES = 8
"""The first updates are checked again once there are at least this many."""

RECOVERED_AFTER_KEPT = 8
"""After this many consecutive kept versions, the hub doubles a learning rate that a rollback
halved.
"""

WATCHED_PER_MEMBER = 8
"""Above this number of entries per member, the hub drops the entries of evicted devices."""

PAST_MAX = 32
"""Number of past alarms in the status."""

Fault = Literal["alarm", "first"]
"""The reason for a rollback: an alarm about the fleet, or a first update that corrupted the
model.
"""

_BEGUN: dict[Remedy, str] = {
    "alert": "no action was taken",
    "increase_frequency": "intervals are halved",
    "reduce_lr": "the hub's learning rate is halved",
    "reduce_local_lr": "the devices' learning rates are halved",
    "rollback": "rolled back to a version from before the alarm, with half the hub's learning rate",
}
"""A description of each remedy, for the report when an alarm starts."""

_ENDED: dict[Remedy, str] = {
    "alert": "no action was taken",
    "increase_frequency": "intervals are back to normal",
    "reduce_lr": "the hub's learning rate is back to normal",
    "reduce_local_lr": "the devices' learning rates are back to normal",
    "rollback": "the hub's learning rate rises again while training stays calm",
}
"""A description of each remedy, for the report when an alarm ends."""

EXCLUDE = "to exclude it, run 'edgeasync device quarantine {}'"
EXCLUDED = "already excluded by an operator"
PROBATION = "on probation: its updates are clipped to a fraction of the usual norm"


class Cause(msgspec.Struct):
    """The reason for an alarm, as found by one detector.

    `found` is the latest evidence. `updates` counts the updates in which the detector found it.
    `calm` counts the later updates in which the detector did not find it.
    """

    found: Evidence
    begun_s: float
    updates: int
    calm: int = 0


class Alarm(msgspec.Struct):
    """An active alarm about one device or, if `device_id` is empty, about the whole fleet.

    `causes` maps the number of each detector to the cause that it found.
    """

    causes: dict[int, Cause]
    begun_s: float
    device_id: str = ""
    voter: str = ""

    @property
    def words(self) -> str:
        """The descriptions of all causes, joined into one text."""
        return "; ".join([cause.found.words for cause in self.causes.values()])


class PastAlarm(msgspec.Struct, frozen=True):
    """An alarm that has ended."""

    device_id: str
    words: str
    begun_s: float
    ended_s: float


class Exclusion(msgspec.Struct, frozen=True):
    """An operator's order: the updates of a device and of its key do not count.

    The order is in force until the operator releases the device.
    """

    device_id: str
    since_s: float


class DivergenceState(msgspec.Struct):
    """The durable fields of `DivergenceGuard`.

    - `devices` maps device ids to alarms, `fleet` maps detectors to alarms, and `orders` maps
      voters to exclusions.
    - `causes` counts, by detector and device, the consecutive updates with a cause that has not
      raised an alarm yet.
    - `caution` is the factor by which rollbacks reduced the hub's learning rate. It rises again as
      versions are kept.
    - `counted` lists the devices with a counted update since the start or the last rollback.
    - `first` lists the first updates since the start or the last rollback. It becomes `None` once
      there are enough updates to compare.
    - `unbounded` lists the devices that sent an unclipped update since the start or the last
      rollback.
    """

    devices: dict[str, Alarm] = {}
    fleet: dict[int, Alarm] = {}
    past: list[PastAlarm] = []
    orders: dict[str, Exclusion] = {}
    rollbacks: int = 0
    calm_since_kept: int = 0
    kept_in_a_row: int = 0
    caution: float = 1.0
    counted: dict[str, None] = {}
    first: list[Observation] | None = []
    unbounded: dict[str, None] = {}
    causes: dict[tuple[int, str], int] = {}


class DivergenceGuard:
    """Runs the detectors on every update, tracks alarms and orders, and triggers rollbacks."""

    def __init__(self, monitor: Monitor, *, probation: bool) -> None:
        self.state = DivergenceState()
        numbered = list(enumerate(monitor.detectors))
        self._detectors: dict[Scope, list[tuple[int, Detector]]] = {
            "device": [(number, detector) for number, detector in numbered if detector.scope == "device"],
            "fleet": [(number, detector) for number, detector in numbered if detector.scope == "fleet"],
        }
        self._causes = {
            scope: [detector.cause for _, detector in detectors] for scope, detectors in self._detectors.items()
        }
        self._calm_updates = monitor.calm_updates
        self._rolls_back = monitor.rolls_back
        self._probation = probation

    @property
    def count(self) -> int:
        """The number of active alarms."""
        return len(self.state.devices) + len(self.state.fleet)

    @property
    def learning_rate_factor(self) -> float:
        """The factor by which rollbacks and remedies scale the hub's learning rate."""
        return self.state.caution * (REDUCTION if self.is_active("reduce_lr") else 1.0)

    @property
    def local_learning_rate_factor(self) -> float:
        """The factor by which devices must multiply their learning rates."""
        return REDUCTION if self.is_active("reduce_local_lr") else 1.0

    def is_active(self, remedy: Remedy) -> bool:
        """Return whether a fleet alarm with this remedy is active."""
        alarms = self.state.fleet
        return bool(alarms) and any(
            detector.remedy == remedy for n, detector in self._detectors["fleet"] if n in alarms
        )

    def is_on_probation(self, voter: str) -> bool:
        """Return whether a voter is on probation because one of its devices has an alarm."""
        alarms = self.state.devices
        return bool(alarms) and self._probation and any(alarm.voter == voter for alarm in alarms.values())

    # -- updates ---------------------------------------------------------------------------------------------

    def watch_device(
        self,
        update: Observation,
        fleet: FleetMeasurements,
        now_s: float,
        *,
        voters: Container[str],
        voters_live: int,
        calms: bool = True,
    ) -> tuple[list[HubEffect], bool]:
        """Run the device detectors on an update.

        Return reports, and whether to roll back. If `calms` is false, the update cannot end an
        alarm.
        """
        reports = self._look(update, fleet, "device", now_s, calms=calms)
        epidemic = self._report_epidemic(voters, voters_live, now_s) if len(self.state.devices) > 1 else []
        return reports + epidemic, bool(epidemic)

    def watch_fleet(
        self, update: Observation, fleet: FleetMeasurements, now_s: float
    ) -> tuple[list[HubEffect], Fault | None]:
        """Run the fleet detectors on an update that counts.

        Return reports and, if a rollback is needed, its cause. The first updates are folded before
        a usual norm is known, so they are not clipped. Once there are enough updates to compare,
        this method checks whether one of the first updates was far too long.
        """
        before = tuple(self.state.fleet)
        reports = self._look(update, fleet, "fleet", now_s)
        if reports:
            begun = self.state.fleet.keys() - set(before)
            if any(
                detector.remedy == "rollback" for number, detector in self._detectors["fleet"] if number in begun
            ):
                return reports, "alarm"
        if self.state.first is None:
            return reports, None
        for one in self._take_first(self.state.first, update, fleet):
            # The usual norm may have dropped since: at first, it always does with model averaging.
            peak = fleet.lengths.peak
            if one.device_id in self.state.unbounded and one.norm > FIRST_RATIO * peak > 0.0:
                times = one.norm / peak
                words = f"the norm of one of its first updates was {factor(times)} times the usual norm"
                remedy = f"; {_BEGUN['rollback']}" if self._rolls_back else ""
                told = HubReport("alarm", one.device_id, words + remedy, {"times_usual": times})
                return [*reports, told], "first" if self._rolls_back else None
        return reports, None

    def note_unbounded(self, device_id: str) -> None:
        """Record that an unclipped update of the device was folded."""
        if self.state.first is not None:
            self.state.unbounded[device_id] = None

    def count_folded(self, updates: int, members: int) -> bool:
        """Count folded updates; return whether to keep their version for a rollback."""
        state = self.state
        # Device alarms do not matter here, because each update is clipped.
        state.calm_since_kept = 0 if state.fleet else state.calm_since_kept + updates
        # A device shows only in its next update that it trained from a corrupted version, so wait.
        if not self._rolls_back or state.calm_since_kept < max(KEEP_EVERY_UPDATES, 2 * members):
            return False
        state.calm_since_kept = 0
        state.kept_in_a_row += 1
        if state.kept_in_a_row % RECOVERED_AFTER_KEPT == 0:
            state.caution = min(1.0, state.caution / REDUCTION)
        return True

    def rolled_back(self) -> None:
        """Reset the observations, and reduce the hub's learning rate."""
        state = self.state
        state.rollbacks += 1
        state.calm_since_kept = state.kept_in_a_row = 0
        state.caution = max(CAUTION_MIN, state.caution * REDUCTION)
        state.counted.clear()
        state.unbounded.clear()
        state.causes.clear()
        state.first = []

    # -- devices ---------------------------------------------------------------------------------------------

    def order(self, voter: str, device_id: str, now_s: float) -> list[HubEffect]:
        """Exclude a voter by an operator's order.

        Return a report if the voter was not excluded before.
        """
        if voter in self.state.orders:
            return []
        self.state.orders[voter] = Exclusion(device_id, now_s)
        return [HubReport("excluded", device_id, "by an operator's order; its updates no longer count")]

    def release(self, voter: str, device_id: str, now_s: float) -> list[HubEffect]:
        """End the order about a voter and the alarms of its devices.

        Return a report if there were any.
        """
        ordered = self.state.orders.pop(voter, None)
        alarming = [name for name, alarm in self.state.devices.items() if alarm.voter == voter]
        for name in alarming:
            self._end(name, now_s)
        if ordered is None and not alarming:
            return []
        return [HubReport("released", device_id, "by an operator's order; its updates count again")]

    def voter_of(self, device_id: str) -> str | None:
        """Return the voter of a device with an order or an alarm, even if it was evicted."""
        if (alarm := self.state.devices.get(device_id)) is not None:
            return alarm.voter
        orders = self.state.orders.items()
        return next((voter for voter, order in orders if order.device_id == device_id), None)

    def keep_only(self, members: Collection[str]) -> None:
        """If there are too many entries, drop those of evicted devices, but keep all orders."""
        state = self.state
        if len(state.devices) + len(state.causes) + len(state.counted) <= WATCHED_PER_MEMBER * len(members):
            return
        state.devices = {device_id: alarm for device_id, alarm in state.devices.items() if device_id in members}
        state.causes = {key: count for key, count in state.causes.items() if not key[1] or key[1] in members}
        state.counted = {device_id: None for device_id in state.counted if device_id in members}

    def revoke(self, voter: str, device_id: str, now_s: float) -> None:
        """Drop the entries of a device whose key is no longer valid, and the order about it."""
        self._end(device_id, now_s)
        self.state.counted.pop(device_id, None)
        self.state.orders.pop(voter, None)

    def active_alarms(self, now_s: float) -> list[ActiveAlarm]:
        """Return the active alarms for the status."""
        state = self.state
        remedies = {number: detector.remedy for number, detector in self._detectors["fleet"]}
        alarms = [
            *[(alarm, remedies[number]) for number, alarm in state.fleet.items() if number in remedies],
            *[(alarm, self._measure(alarm)) for alarm in state.devices.values()],
        ]
        return [
            ActiveAlarm(
                device=alarm.device_id,
                cause=alarm.words,
                remedy=remedy,
                since_s=round(now_s - alarm.begun_s, 3),
                causes=[_describe(cause, now_s) for cause in alarm.causes.values()],
            )
            for alarm, remedy in alarms
        ]

    def ended_alarms(self, now_s: float) -> list[EndedAlarm]:
        """Return the latest ended alarms for the status."""
        return [
            EndedAlarm(
                device=past.device_id,
                cause=past.words,
                ended_ago_s=round(now_s - past.ended_s, 3),
                duration_s=round(past.ended_s - past.begun_s, 3),
            )
            for past in self.state.past
        ]

    def _measure(self, alarm: Alarm) -> str:
        """Return the status name of the measure taken against a device with an alarm."""
        if alarm.voter in self.state.orders:
            return "excluded"
        return "probation" if self._probation else "alert"

    # -- detectors ---------------------------------------------------------------------------------------------

    def _look(
        self, update: Observation, fleet: FleetMeasurements, scope: Scope, now_s: float, *, calms: bool = True
    ) -> list[HubEffect]:
        """Run the detectors of one scope on an update; return reports of alarms that changed.

        An alarm is reported when it starts, when another cause is added to it, and when it ends. A
        cause ends only after `calm_updates` consecutive updates without it, so that the alarm does
        not flap with each outlier.
        """
        state = self.state
        alarms: Mapping[Any, Alarm] = state.devices if scope == "device" else state.fleet
        if not alarms and not state.causes:
            for cause_of in self._causes[scope]:
                if cause_of(update, fleet) is not None:
                    break
            else:
                return []  # the usual case, checked for every update
        reports: list[HubEffect] = []
        for number, detector in self._detectors[scope]:
            found = detector.cause(update, fleet)
            reports += self._follow(number, detector, found, update, now_s, calms=calms)
        return reports

    def _follow(
        self,
        number: int,
        detector: Detector,
        found: Evidence | None,
        update: Observation,
        now_s: float,
        *,
        calms: bool,
    ) -> list[HubEffect]:
        """Start, continue or end the cause that a detector found.

        Return a report if the cause starts or the alarm ends.
        """
        state, of_device = self.state, detector.scope == "device"
        device_id = update.device_id if of_device else ""
        key = number, device_id
        alarm = state.devices.get(device_id) if of_device else state.fleet.get(number)
        cause = None if alarm is None else alarm.causes.get(number)
        if found is None:
            if not calms:
                return []
            if alarm is None or cause is None:
                state.causes.pop(key, None)
                return []
            cause.calm += 1
            return self._calm(number, detector, alarm, now_s) if cause.calm >= self._calm_updates else []
        if cause is not None:
            cause.calm, cause.found, cause.updates = 0, found, cause.updates + 1
            return []
        in_a_row = state.causes.pop(key, 0) + 1
        if in_a_row < detector.count_max * (update.slowness if detector.patient else 1.0):
            state.causes[key] = in_a_row
            return []
        cause = Cause(found, now_s, in_a_row)
        if not of_device:
            state.fleet[number] = Alarm({number: cause}, now_s)
            return [HubReport("alarm", "", f"{found.words}; {_BEGUN[detector.remedy]}", found.figures)]
        if alarm is None:
            state.devices[device_id] = Alarm({number: cause}, now_s, device_id, update.voter)
        else:
            alarm.causes[number] = cause
        act = PROBATION if self._probation else EXCLUDE.format(device_id)
        if update.voter in state.orders:
            act = EXCLUDED
        return [HubReport("alarm", device_id, f"{found.words}; {act}", {**found.figures, "updates": in_a_row})]

    def _calm(self, number: int, detector: Detector, alarm: Alarm, now_s: float) -> list[HubEffect]:
        """End a cause; if its alarm has no other cause, end the alarm and return a report."""
        if len(alarm.causes) > 1:
            del alarm.causes[number]
            return []
        lasted = f"ended after {now_s - alarm.begun_s:.0f} s: {alarm.words}"
        self._note_past(alarm, now_s)
        if alarm.device_id:
            del self.state.devices[alarm.device_id]
            return [HubReport("calm", alarm.device_id, lasted)]
        del self.state.fleet[number]
        return [HubReport("calm", "", f"{lasted}; {_ENDED[detector.remedy]}")]

    def _end(self, device_id: str, now_s: float) -> Alarm | None:
        """End the alarm about a device, if any, and return it."""
        for number, _ in self._detectors["device"]:
            self.state.causes.pop((number, device_id), None)
        alarm = self.state.devices.pop(device_id, None)
        if alarm is not None:
            self._note_past(alarm, now_s)
        return alarm

    def _note_past(self, alarm: Alarm, now_s: float) -> None:
        add_recent(self.state.past, PastAlarm(alarm.device_id, alarm.words, alarm.begun_s, now_s), PAST_MAX)

    def _report_epidemic(self, voters: Container[str], voters_live: int, now_s: float) -> list[HubEffect]:
        """Report that the model is corrupted if more than half of the voters have alarms."""
        if not self._rolls_back:
            return []
        counted, orders = self.state.counted, self.state.orders
        counting = [a for a in self.state.devices.values() if a.voter in voters and a.voter not in orders]
        alarmed = [alarm for alarm in counting if alarm.device_id in counted]
        count = len({alarm.voter for alarm in alarmed})
        if count < 2 or 2 * count <= voters_live:
            return []
        for alarm in alarmed:
            self._end(alarm.device_id, now_s)
        fault = f"{count} of {voters_live} devices have alarms, so the model itself is corrupted"
        return [HubReport("alarm", "", f"{fault}; {_BEGUN['rollback']}")]

    def _take_first(
        self, first: list[Observation], update: Observation, fleet: FleetMeasurements
    ) -> list[Observation]:
        """Store one of the first updates.

        Once there are enough of them to compare, return all of them, but only once.
        """
        first.append(update)
        if len(first) < FIRST_UPDATES or (len(fleet.lengths) < DEVICES_MIN and len(first) < WINDOW):
            return []
        self.state.first = None
        return first


def _describe(cause: Cause, now_s: float) -> AlarmCause:
    return AlarmCause(
        cause=cause.found.words,
        since_s=round(now_s - cause.begun_s, 3),
        updates=cause.updates,
        figures={name: float(f"{value:.6g}") for name, value in cause.found.figures.items()},
    )
