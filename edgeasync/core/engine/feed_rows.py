"""The devices as viewers of the feed know them: encoded rows, and who needs attention."""

from collections import Counter
from collections.abc import Iterable
from heapq import nsmallest
from typing import NamedTuple

import msgspec

from edgeasync.core.hub.attention import Urgency, Usual, look_at, usual_of
from edgeasync.core.hub.device_status import device_row
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import LIVE
from edgeasync.protocol.feed import ATTENTION_MAX, Attention
from edgeasync.protocol.status import ActiveAlarm, DeviceStatus


class Described(NamedTuple):
    """A device as described for the next update; `row` is `None` if the hub has forgotten it."""

    name: str
    state: str
    row: bytes | None


class FleetRows:
    """Describes devices, and keeps what was published of them.

    `zero_s` is the wall clock minus the core's clock, in seconds.
    """

    def __init__(self, core: HubCore, zero_s: float) -> None:
        self._core = core
        self._members = core.members
        self.zero_s = zero_s
        self.rows: dict[str, bytes] = {}
        """The published row of each device, encoded."""
        self._states: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        """Number of published devices in each state; "" counts those that are not published."""
        self._urgencies: dict[str, Urgency] = {}
        self._alarms: dict[str, ActiveAlarm] = {}
        self._usual = Usual(0.0, 0.0)

    def begin(self, now_s: float) -> Iterable[str]:
        """Prepare to describe devices; return those whose alarm has begun or ended since."""
        alarms = alarms_of_devices(self._core, now_s)
        changed = alarms.keys() ^ self._alarms.keys()
        self._alarms, self._usual = alarms, usual_now(self._core)
        return changed

    def describe(self, names: Iterable[str], now_s: float) -> list[Described]:
        """Describe devices, and record which of them need attention."""
        known, described = [], []
        for name in names:
            if (member := self._members.members.get(name)) is not None:
                known.append(member)
            else:
                self._urgencies.pop(name, None)
                described.append(Described(name, "", None))
        return described + self.look(self._core.describe_devices(known, now_s), now_s)

    def look(self, devices: Iterable[DeviceStatus], now_s: float) -> list[Described]:
        """Encode the rows of devices, and record which of them need attention."""
        described = []
        for device in devices:
            found = look_at(device, self._alarms.get(device.id), self._usual)
            if found is not None:
                self._urgencies[device.id] = found[0]
            else:
                self._urgencies.pop(device.id, None)
            row = msgspec.json.encode(device_row(device, self.zero_s + now_s))
            described.append(Described(device.id, device.state, row))
        return described

    @property
    def counts(self) -> dict[str, int]:
        """Number of published devices in each state."""
        return {state: count for state, count in self._counts.items() if state and count}

    @property
    def attention_count(self) -> int:
        """Number of described devices that need attention."""
        return len(self._urgencies)

    def attention(self, now_s: float) -> list[Attention]:
        """Return the devices that need attention most, described now, the most urgent first."""
        urgent = nsmallest(ATTENTION_MAX, self._urgencies.items(), key=lambda one: (one[1], one[0]))
        members = self._members.members
        known = [member for name, _ in urgent if (member := members.get(name)) is not None]
        found = [
            look_at(device, self._alarms.get(device.id), self._usual)
            for device in self._core.describe_devices(known, now_s)
        ]
        known_found = [one for one in found if one is not None]
        return [one for _, one in sorted(known_found, key=lambda one: (one[0], one[1].device))]

    def apply(self, described: Iterable[Described]) -> tuple[list[bytes], list[str]]:
        """Publish rows; return those that differ, and the names of forgotten devices."""
        if not self.rows:  # faster than the loop below
            known = [one for one in described if one.row is not None]
            self.rows = {name: row for name, _, row in known if row is not None}
            self._states = {name: state for name, state, _ in known}
            self._counts = Counter(self._states.values())
            return list(self.rows.values()), []
        changed: list[bytes] = []
        gone: list[str] = []
        for name, state, row in described:
            if self.rows.get(name) == row:
                continue
            before = self._states.pop(name, None)
            if row is None:
                del self.rows[name]
                gone.append(name)
            else:
                self.rows[name] = row
                self._states[name] = state
                changed.append(row)
            if before != state:
                self._counts[before or ""] -= 1
                self._counts[state] += 1
        return changed, gone


def alarms_of_devices(core: HubCore, now_s: float) -> dict[str, ActiveAlarm]:
    """Return the active alarms about devices."""
    return {alarm.device: alarm for alarm in core.policy_engine.divergence.active_alarms(now_s) if alarm.device}


def usual_now(core: HubCore) -> Usual:
    """Return the medians of the connected devices or, in a large fleet, of a sample."""
    sample = [member.measurements for member in core.members.sample(core.version) if member.state in LIVE]
    return usual_of((one.examples_per_s, one.communication_s) for one in sample)
