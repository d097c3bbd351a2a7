"""Warnings about devices, alarms of the whole fleet with their remedies, and operators' orders. Part of `HubCore`.

Statistics warn, and never shut a device out: from norms and losses alone an honest device with other data looks
like a spoilt one, and a model that never sees a device's data fits them ever less. Only an operator shuts out.
"""

from collections.abc import Collection, Container, Mapping
from typing import Any, Literal

import msgspec

from edgeasync.core.hub.effects import HubEffect, HubReport
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.measurements.medians import WINDOW, add_recent
from edgeasync.measurements.votes import DEVICES_MIN
from edgeasync.policies.monitor import REDUCTION, Detector, Evidence, Monitor, Observation, Remedy, Scope

KEEP_EVERY_UPDATES = 32
"""Calm updates between two versions that are kept for a rollback; more in a large fleet."""

CAUTION_MIN = 1 / 64
"""Least factor of the hub's learning rate, after however many rollbacks."""

FIRST_RATIO = 4.0
"""A first update that was not clipped spoilt the model if it is longer than this many times the peak."""

FIRST_UPDATES = 8
"""The first updates are looked at again when there are this many, or later."""

RECOVERED_AFTER_KEPT = 8
"""After this many versions kept in a row the learning rate, which a rollback halved, is doubled again."""

WATCHED_PER_MEMBER = 8
"""With more alarms, causes and names than this for each known device, those of forgotten ones are dropped."""

PAST_MAX = 32
"""How many alarms are remembered that are over."""

Fault = Literal["alarm", "first"]
"""Why the hub rolls back: an alarm of the fleet, or a first update, from before there was a length to clip to."""

_BEGUN: dict[Remedy, str] = {
    "alert": "nothing is changed",
    "increase_frequency": "intervals are halved",
    "reduce_lr": "the hub's learning rate is halved",
    "reduce_local_lr": "the devices' learning rates are halved",
    "rollback": "back to the model kept while all was calm, at half the hub's learning rate",
}
"""Each remedy in words, for the report of an alarm that begins."""

_ENDED: dict[Remedy, str] = {
    "alert": "nothing was changed",
    "increase_frequency": "intervals are as before",
    "reduce_lr": "the hub's learning rate is as before",
    "reduce_local_lr": "the devices' learning rates are as before",
    "rollback": "the hub's learning rate grows again as versions are kept",
}
"""Each remedy in words, for the report of an alarm that ends."""

EXCLUDE = "'edgeasync device quarantine {}' excludes it"
EXCLUDED = "an operator has excluded it"
PROBATION = "it is on probation: its updates count as short ones"


class Cause(msgspec.Struct):
    """Why an alarm is active: what its detector found last, when that began, and the calm updates since."""

    found: Evidence
    begun_s: float
    updates: int
    calm: int = 0


class Alarm(msgspec.Struct):
    """An active alarm: of a device and its voter, or of the fleet (both empty). Its causes by their detector."""

    causes: dict[int, Cause]
    begun_s: float
    device_id: str = ""
    voter: str = ""

    @property
    def words(self) -> str:
        """All causes in a sentence."""
        return "; ".join([cause.found.words for cause in self.causes.values()])


class PastAlarm(msgspec.Struct, frozen=True):
    """An alarm that is over."""

    device_id: str
    words: str
    begun_s: float
    ended_s: float


class Exclusion(msgspec.Struct, frozen=True):
    """An operator's order: updates of this device, and of others with its key, do not count until its release."""

    device_id: str
    since_s: float


class DivergenceState(msgspec.Struct):
    """The durable fields of `DivergenceGuard`.

    The keys of `devices` are device ids, those of `fleet` detectors, and those of `orders` voters. `causes` has,
    by detector and device, the number of updates in a row that had a cause, but not enough for an alarm yet.
    `caution` is the factor that rollbacks leave of the hub's learning rate; it grows again as versions are kept.
    `counted` has the devices whose updates have counted since the start or the last rollback. `first` has the
    first updates since then, until there are enough to compare; then it is `None`. `unbounded` has the devices
    with an update folded meanwhile that nothing could shorten.
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
    """Shows every update to the detectors, keeps alarms and orders, and decides when the hub rolls back."""

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
        """How many alarms are active."""
        return len(self.state.devices) + len(self.state.fleet)

    @property
    def learning_rate_factor(self) -> float:
        """The factor that remedies leave of the hub's learning rate."""
        return self.state.caution * (REDUCTION if self.is_active("reduce_lr") else 1.0)

    @property
    def local_learning_rate_factor(self) -> float:
        """The factor by which devices are to multiply their learning rates."""
        return REDUCTION if self.is_active("reduce_local_lr") else 1.0

    def is_active(self, remedy: Remedy) -> bool:
        """Return whether an alarm of the fleet with this remedy is active."""
        alarms = self.state.fleet
        return bool(alarms) and any(
            detector.remedy == remedy for n, detector in self._detectors["fleet"] if n in alarms
        )

    def is_on_probation(self, voter: str) -> bool:
        """Return whether a voter's updates count as short ones: there is an alarm about one of its devices."""
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
        """Show an update to the detectors of devices, before it counts; unless it `calms`, it ends no alarm."""
        reports = self._look(update, fleet, "device", now_s, calms=calms)
        epidemic = self._report_epidemic(voters, voters_live, now_s) if len(self.state.devices) > 1 else []
        return reports + epidemic, bool(epidemic)

    def watch_fleet(
        self, update: Observation, fleet: FleetMeasurements, now_s: float
    ) -> tuple[list[HubEffect], Fault | None]:
        """Show an update that will count to the fleet's detectors; return why to roll back, if the hub should.

        The first updates are folded before the clip has a usual length. Once there are enough to compare, look for
        one among them that was far too long.
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
            # The usual length may have shrunk since then: the first updates of a model average always do.
            peak = fleet.lengths.peak
            if one.device_id in self.state.unbounded and one.norm > FIRST_RATIO * peak > 0.0:
                times = one.norm / peak
                words = f"one of its first updates was {times:.3g} times as long as is usual"
                remedy = f"; {_BEGUN['rollback']}" if self._rolls_back else ""
                told = HubReport("alarm", one.device_id, words + remedy, {"times_usual": times})
                return [*reports, told], "first" if self._rolls_back else None
        return reports, None

    def note_unbounded(self, device_id: str) -> None:
        """Note that an update of the device was folded with whatever length it has."""
        if self.state.first is not None:
            self.state.unbounded[device_id] = None

    def count_folded(self, updates: int, members: int) -> bool:
        """Count updates that were folded; return whether to keep their version for a rollback."""
        state = self.state
        # Alarms of devices do not count: each update is bounded.
        state.calm_since_kept = 0 if state.fleet else state.calm_since_kept + updates
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

    # -- devices ---------------------------------------------------------------------------------------------

    def order(self, voter: str, device_id: str, now_s: float) -> list[HubEffect]:
        """Exclude a voter by an operator's order; return nothing if it is excluded already."""
        if voter in self.state.orders:
            return []
        self.state.orders[voter] = Exclusion(device_id, now_s)
        return [HubReport("excluded", device_id, "by an operator's order: its updates do not count")]

    def release(self, voter: str, device_id: str, now_s: float) -> list[HubEffect]:
        """End the order about a voter, and the alarms about its devices; return nothing if there is neither."""
        ordered = self.state.orders.pop(voter, None)
        alarming = [name for name, alarm in self.state.devices.items() if alarm.voter == voter]
        for name in alarming:
            self._end(name, now_s)
        if ordered is None and not alarming:
            return []
        return [HubReport("released", device_id, "by an operator's order: its updates count")]

    def voter_of(self, device_id: str) -> str | None:
        """Return the voter of a device that there is an order or an alarm about; the hub may have forgotten it."""
        if (alarm := self.state.devices.get(device_id)) is not None:
            return alarm.voter
        orders = self.state.orders.items()
        return next((voter for voter, order in orders if order.device_id == device_id), None)

    def keep_only(self, members: Collection[str]) -> None:
        """Drop what is known of devices that the hub has forgotten, once that is much; orders stay."""
        state = self.state
        if len(state.devices) + len(state.causes) + len(state.counted) <= WATCHED_PER_MEMBER * len(members):
            return
        state.devices = {device_id: alarm for device_id, alarm in state.devices.items() if device_id in members}
        state.causes = {key: count for key, count in state.causes.items() if not key[1] or key[1] in members}
        state.counted = {device_id: None for device_id in state.counted if device_id in members}

    def revoke(self, voter: str, device_id: str, now_s: float) -> None:
        """Forget a device whose key counts no more, and the order about it."""
        self._end(device_id, now_s)
        self.state.counted.pop(device_id, None)
        self.state.orders.pop(voter, None)

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return the active alarms and the last that are over, as the status shows them."""
        state = self.state
        remedies = {number: detector.remedy for number, detector in self._detectors["fleet"]}
        alarms = [
            *[(alarm, remedies[number]) for number, alarm in state.fleet.items() if number in remedies],
            *[(alarm, self._measure(alarm)) for alarm in state.devices.values()],
        ]
        return {
            "alarms": [
                {
                    "device": alarm.device_id,
                    "cause": alarm.words,
                    "remedy": remedy,
                    "since_s": round(now_s - alarm.begun_s, 3),
                    "causes": [
                        {
                            "cause": cause.found.words,
                            "since_s": round(now_s - cause.begun_s, 3),
                            "updates": cause.updates,
                            "figures": {
                                name: float(f"{value:.6g}") for name, value in cause.found.figures.items()
                            },
                        }
                        for cause in alarm.causes.values()
                    ],
                }
                for alarm, remedy in alarms
            ],
            "alarms_past": [
                {
                    "device": past.device_id,
                    "cause": past.words,
                    "ended_ago_s": round(now_s - past.ended_s, 3),
                    "duration_s": round(past.ended_s - past.begun_s, 3),
                }
                for past in state.past
            ],
        }

    def _measure(self, alarm: Alarm) -> str:
        """Return what is done about a device with an alarm, as the status names it."""
        if alarm.voter in self.state.orders:
            return "excluded"
        return "probation" if self._probation else "alert"

    # -- detectors ---------------------------------------------------------------------------------------------

    def _look(
        self, update: Observation, fleet: FleetMeasurements, scope: Scope, now_s: float, *, calms: bool = True
    ) -> list[HubEffect]:
        """Show an update to the detectors of a scope; return reports of alarms that begin, grow or end.

        An alarm is reported when it begins, with each cause that joins it, and when it ends, not with every
        update. A cause ends only after `calm_updates` in a row, so that it does not come and go with each outlier.
        """
        state = self.state
        alarms: Mapping[Any, Alarm] = state.devices if scope == "device" else state.fleet
        if not alarms and not state.causes:
            for cause_of in self._causes[scope]:
                if cause_of(update, fleet) is not None:
                    break
            else:
                return []  # the usual case, with every update
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
        """Begin, continue or end the cause of a detector; return a report if it begins or ends."""
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
        """End a cause; return a report if that ends its alarm."""
        if len(alarm.causes) > 1:
            del alarm.causes[number]
            return []
        lasted = f"over after {now_s - alarm.begun_s:.0f} s: {alarm.words}"
        self._note_past(alarm, now_s)
        if alarm.device_id:
            del self.state.devices[alarm.device_id]
            return [HubReport("calm", alarm.device_id, lasted)]
        del self.state.fleet[number]
        return [HubReport("calm", "", f"{lasted}; {_ENDED[detector.remedy]}")]

    def _end(self, device_id: str, now_s: float) -> Alarm | None:
        """End the alarm about a device, if there is one."""
        for number, _ in self._detectors["device"]:
            self.state.causes.pop((number, device_id), None)
        alarm = self.state.devices.pop(device_id, None)
        if alarm is not None:
            self._note_past(alarm, now_s)
        return alarm

    def _note_past(self, alarm: Alarm, now_s: float) -> None:
        add_recent(self.state.past, PastAlarm(alarm.device_id, alarm.words, alarm.begun_s, now_s), PAST_MAX)

    def _report_epidemic(self, voters: Container[str], voters_live: int, now_s: float) -> list[HubEffect]:
        """Return a report if there are alarms about more than half of the voters: the model is at fault."""
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
        fault = f"{count} of {voters_live} devices are alarming: the model is at fault"
        return [HubReport("alarm", "", f"{fault}; {_BEGUN['rollback']}")]

    def _take_first(
        self, first: list[Observation], update: Observation, fleet: FleetMeasurements
    ) -> list[Observation]:
        """Keep one of the first updates; return all of them, once, when there are enough to compare."""
        first.append(update)
        if len(first) < FIRST_UPDATES or (len(fleet.lengths) < DEVICES_MIN and len(first) < WINDOW):
            return []
        self.state.first = None
        return first
