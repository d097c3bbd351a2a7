"""Find the devices that need an operator's attention, from a status."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

from edgeasync.core.hub.member import LIVE
from edgeasync.measurements.medians import factor, median
from edgeasync.protocol.feed import Attention, Reason
from edgeasync.protocol.status import ActiveAlarm, DeviceStatus, HubStatus

_ORDER: dict[str, int] = {reason: place for place, reason in enumerate(get_args(Reason))}

_HOT = re.compile(r"\d+ C")
"""The pace reason of a device that slows down because of its temperature."""

STUCK_S = 60.0
"""A device that took no local step for this long since it joined is stuck."""

REJECTED = 0.1
"""A device needs attention if the hub rejects more than this fraction of its updates."""

KEPT = 0.5
"""A device needs attention if clipping leaves less than this fraction of the length of its updates.
Honest devices with unusual data kept more than 80 % in our trials.
"""

SLOWER = 4.0
"""A device or link is slow if the fleet's median is better by this factor."""

TALKING = 0.5
"""A slow link matters if communication takes at least this share of a device's cycle."""

COMPARED_MIN = 3
"""Minimum number of devices with measurements, to compare a device with the others."""


class _Finding(NamedTuple):
    reason: Reason
    weight: float
    words: str


Urgency = tuple[int, float]
"""Orders devices that need attention, the most urgent first."""


class Usual(NamedTuple):
    """Medians of the connected devices, or 0 if too few have been measured."""

    examples_per_s: float
    talk_s: float


def find_attention(status: HubStatus) -> list[Attention]:
    """Return the devices that need attention, the most urgent first."""
    alarms = {alarm.device: alarm for alarm in status.alarms}
    here = [device for device in status.devices if device.state in LIVE]
    usual = usual_of((device.examples_per_s, device.talk_s) for device in here)
    looked = [look_at(device, alarms.get(device.id), usual) for device in status.devices]
    found = sorted([one for one in looked if one is not None], key=lambda one: (one[0], one[1].device))
    return [one for _, one in found] + absent_devices(status.refused, status.enrolled_unseen)


def absent_devices(refused: Mapping[str, str], unseen: Iterable[str]) -> list[Attention]:
    """Return entries for refused devices, and for devices whose key may join, but that never came."""
    words = "its key may join, but it has not connected in this run"
    return [
        *[Attention(name, "refused", f"refused: {sentence}") for name, sentence in refused.items()],
        *[Attention(name, "never_came", words) for name in unseen if name not in refused],
    ]


def look_at(device: DeviceStatus, alarm: ActiveAlarm | None, usual: Usual) -> tuple[Urgency, Attention] | None:
    """Return why a device needs attention and how urgently, or `None` if it does not.

    `alarm` is the active alarm about the device, if there is one.
    """
    findings = sorted(_look(device, alarm, usual), key=_urgency)
    if not findings:
        return None
    words = "; ".join([finding.words for finding in findings])
    return _urgency(findings[0]), Attention(device.id, findings[0].reason, words)


def usual_of(measured: Iterable[tuple[float, float]]) -> Usual:
    """Return the medians of the examples per second and the communication times of devices.

    Values of 0 were not measured yet.
    """
    columns = list(zip(*measured, strict=True)) or [(), ()]
    known = [[value for value in column if value > 0.0] for column in columns]
    return Usual(*[median(values) if len(values) >= COMPARED_MIN else 0.0 for values in known])


def _urgency(finding: _Finding) -> Urgency:
    return _ORDER[finding.reason], -finding.weight


def _look(device: DeviceStatus, alarm: ActiveAlarm | None, usual: Usual) -> Iterator[_Finding]:
    if device.state == "lost":
        yield _Finding("lost", device.last_seen_s, f"lost, last seen {duration(device.last_seen_s)} ago")
    if device.quarantine is not None:
        cause, ends = device.quarantine.cause, device.quarantine.ends
        yield _Finding("quarantined", 0.0, f"quarantined: {cause}; ends {ends}")
    if alarm is not None:
        yield _Finding("warned", alarm.since_s, f"warned for {duration(alarm.since_s)}: {alarm.cause}")
    if device.state == "joining" and device.stalled_s > STUCK_S:
        stuck = f"joining for {duration(device.stalled_s)} without a local step: read its agent's log"
        yield _Finding("stuck", device.stalled_s, stuck)
    if device.state == "left" and not device.pushes_answered:
        yield _Finding("stuck", device.last_seen_s, "left without an update: read its agent's log")
    yield from _pace(device)
    yield from _losses(device, warned=alarm is not None)
    if device.state in LIVE:
        yield from _speed(device, usual)


def _pace(device: DeviceStatus) -> Iterator[_Finding]:
    """Yield why a device does not train at full pace."""
    is_hot = _HOT.fullmatch(device.pace_reason) is not None
    if device.state == "paused" and device.pace_percent:
        words = f"no local step for {duration(device.stalled_s)}: its trainer hangs, or the board is overloaded"
        yield _Finding("stuck", device.stalled_s, words)
    elif device.state == "paused" and is_hot:
        yield _Finding("hot", 100.0, f"hot ({device.pace_reason}), so it is paused")
    elif device.state == "paused":
        yield _Finding("paused", 0.0, f"paused: {device.pace_reason}")
    elif is_hot:
        words = f"hot ({device.pace_reason}), so it trains at {device.pace_percent} % of the time"
        yield _Finding("hot", 100.0 - device.pace_percent, words)
    elif device.pace_percent < 100:
        slowed = f"trains at {device.pace_percent} % of the time: {device.pace_reason}"
        yield _Finding("slowed", 100.0 - device.pace_percent, slowed)


def _losses(device: DeviceStatus, *, warned: bool) -> Iterator[_Finding]:
    """Yield whether the hub rejects many of a device's updates, or clips them strongly without a warning."""
    rejected, kept = sum(device.updates_rejected.values()), device.weight_kept
    total = rejected + device.updates_applied
    if rejected > REJECTED * total:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(device.updates_rejected.items()))
        yield _Finding("rejected", rejected / total, f"{rejected} of {total} updates rejected: {reasons}")
    if kept is not None and kept < KEPT and not warned:
        yield _Finding("clipped", 1.0 - kept, f"its updates were clipped to {kept:.0%} of their length")


def _speed(device: DeviceStatus, usual: Usual) -> Iterator[_Finding]:
    """Yield whether a device or its link is far slower than the others."""
    if device.talk_share >= TALKING and device.talk_s >= SLOWER * usual.talk_s > 0.0:
        times = device.talk_s / usual.talk_s
        words = f"slow link: an exchange takes {duration(device.talk_s)}, {factor(times)} times the median"
        yield _Finding("slow_link", times, words)
    if device.examples_per_s and usual.examples_per_s >= SLOWER * device.examples_per_s:
        times = usual.examples_per_s / device.examples_per_s
        words = f"slow: {device.examples_per_s:.3g} examples/s, the median is {factor(times)} times that"
        yield _Finding("slow", times, words)


def duration(seconds: float) -> str:
    """Format a duration with its largest unit.

    >>> [duration(seconds) for seconds in (0.25, 42.0, 150.0, 9000.0, 200000.0)]
    ['0.25 s', '42 s', '2.5 min', '2.5 h', '2.3 days']
    """
    if seconds < 120.0:
        return f"{seconds:.2g} s" if seconds < 10.0 else f"{seconds:.0f} s"
    for unit, size_s, limit_s in (("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0)):
        if seconds < limit_s:
            return f"{seconds / size_s:.2g} {unit}" if seconds < 10 * size_s else f"{seconds / size_s:.0f} {unit}"
    return f"{seconds / 86400.0:.2g} days" if seconds < 864_000.0 else f"{seconds / 86400.0:.0f} days"
