"""The alarms of the divergence monitor that are under way. Part of `HubCore`; scalars only."""

from collections.abc import Iterator, Sequence

import msgspec

from edgeasync.policies.history import FleetHistory
from edgeasync.policies.monitor import Observation, Remedy, Scope, Watch


class Alarm(msgspec.Struct):
    """An alarm that has not ended: its watch, the device at fault (empty: the fleet), and calm updates since."""

    watch: int
    device_id: str
    remedy: Remedy
    cause: str
    calm: int = 0


class Change(msgspec.Struct, frozen=True, gc=False):
    """An alarm that has begun or ended."""

    alarm: Alarm
    begun: bool


class AlarmBoard:
    """The alarms under way. Deterministic; at most one for each watch and device."""

    def __init__(self, watches: Sequence[Watch], calm_updates: int) -> None:
        self._watches = tuple(watches)
        self._calm_updates = calm_updates
        self._alarms: dict[tuple[int, str], Alarm] = {}

    def __len__(self) -> int:
        return len(self._alarms)

    def __iter__(self) -> Iterator[Alarm]:
        return iter(self._alarms.values())

    def active(self, remedy: Remedy, device_id: str = "") -> Alarm | None:
        """Return an alarm under way with this remedy, of the device if one is named."""
        for alarm in self._alarms.values():
            if alarm.remedy == remedy and (not device_id or alarm.device_id == device_id):
                return alarm
        return None

    def dump_state(self) -> list[Alarm]:
        """Return the alarms, in the order in which they began."""
        return list(self._alarms.values())

    def load_state(self, alarms: Sequence[Alarm]) -> None:
        """Go on with these alarms."""
        self._alarms = {(alarm.watch, alarm.device_id): alarm for alarm in alarms}

    def forget(self, device_id: str) -> None:
        """Drop the alarms of a device that is known no more."""
        for key in [key for key in self._alarms if key[1] == device_id]:
            del self._alarms[key]

    def look(self, update: Observation, fleet: FleetHistory, scope: Scope) -> list[Change]:
        """Let the watches of a scope see an update; return the alarms that begin or end with it."""
        changes = []
        for number, watch in enumerate(self._watches):
            if watch.scope != scope:
                continue
            device_id = update.device_id if scope == "device" else ""
            cause = watch.cause(update, fleet)
            alarm = self._alarms.get((number, device_id))
            if cause is not None and alarm is None:
                alarm = self._alarms[number, device_id] = Alarm(number, device_id, watch.remedy, cause)
                changes.append(Change(alarm, begun=True))
            elif cause is not None and alarm is not None:
                alarm.calm, alarm.cause = 0, cause
            elif alarm is not None:
                alarm.calm += 1
                if alarm.calm >= self._calm_updates:
                    del self._alarms[number, device_id]
                    changes.append(Change(alarm, begun=False))
        return changes
