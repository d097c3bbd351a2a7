"""The status of devices."""

from collections.abc import Callable, Iterable

from edgeasync.core.hub.budgets import QuotaLeft
from edgeasync.core.hub.member import Member
from edgeasync.protocol.feed import DeviceRow
from edgeasync.protocol.status import DeviceStatus, Quarantine


def describe_devices(
    members: Iterable[Member],
    now_s: float,
    is_quarantined: Callable[[Member], bool],
    quota_of: Callable[[Member, float], QuotaLeft],
) -> list[DeviceStatus]:
    """Return the entries of the devices in the status.

    `is_quarantined` returns whether an operator excluded a member. `quota_of` returns what is left
    of a member's quota.
    """
    return [
        _describe(member, now_s, quota_of(member, now_s), ordered=is_quarantined(member)) for member in members
    ]


def _describe(member: Member, now_s: float, quota: QuotaLeft, *, ordered: bool) -> DeviceStatus:
    measurements, link = member.measurements, member.link
    quarantine = _quarantine(member, now_s, ordered=ordered)
    return DeviceStatus(
        id=member.device_id,
        state=member.shown_state if quarantine is None else "quarantined",
        quarantine=quarantine,
        staleness=measurements.staleness,
        local_steps=measurements.local_steps,
        last_seen_s=round(now_s - member.seen_s, 3),
        examples_per_s=round(measurements.examples_per_s, 1),
        pushes_answered=member.pushes_answered,
        updates_applied=member.updates_applied,
        updates_buffered=member.updates_buffered,
        duplicates=member.duplicates,
        updates_rejected=member.updates_rejected,
        updates_shortened=member.updates_shortened,
        weight_kept=round(member.weight_kept / member.weight, 3) if member.weight else None,
        loss=measurements.last_loss,
        pace_percent=member.pace_percent,
        pace_reason=member.pace_reason,
        temperature_c=member.temperature_c,
        assigned_steps=measurements.assigned_steps,
        why=measurements.why,
        bound=measurements.bound,
        step_s=round(measurements.step_s, 6),
        talk_s=round(measurements.communication_s, 6),
        talk_share=round(measurements.communication_share, 3),
        period_s=round(measurements.period_s or measurements.cycle_s, 6),
        push_codec=member.codec_push,
        bytes_up=member.traffic.up_bytes + link.uncounted[0],
        bytes_down=member.traffic.down_bytes + link.uncounted[1],
        round_trip_s=round(link.round_trip_s, 6),
        bandwidth_bytes_per_s=round(link.bandwidth_bytes_per_s),
        day_bytes=member.traffic.day_bytes(now_s),
        bytes_per_day_max=quota.bytes_per_day_max,
        day_left_bytes=quota.day_left_bytes,
        rest_s=round(max(0.0, member.rest_until_s - now_s), 3),
        stalled_s=round(member.stalled_s(now_s), 3),
        machine=member.profile.machine,
        software=member.profile.software,
        address=link.address,
        joined_s=None if member.notes.joined_s is None else round(now_s - member.notes.joined_s, 3),
        clock_offset_s=link.clock_offset_s,
        why_left="" if member.live else member.notes.why_left,
        last_error=member.notes.error,
        last_error_s=None if member.notes.error_s is None else round(now_s - member.notes.error_s, 3),
    )


def device_row(device: DeviceStatus, time_s: float) -> DeviceRow:
    """Return the row of a device in the feed. It was described at `time_s`, in seconds since 1970."""
    return DeviceRow(
        id=device.id,
        state=device.state,
        last_seen=round(time_s - device.last_seen_s),
        joined_at=None if device.joined_s is None else round(time_s - device.joined_s),
        examples_per_s=device.examples_per_s,
        loss=device.loss,
        staleness=device.staleness,
        local_steps=device.local_steps,
        updates_applied=device.updates_applied,
        updates_rejected=sum(device.updates_rejected.values()),
        period_s=device.period_s,
        talk_share=device.talk_share,
        round_trip_s=device.round_trip_s,
        pace_percent=device.pace_percent,
        temperature_c=device.temperature_c,
        machine=device.machine,
        software=device.software,
        address=device.address,
        clock_offset_s=device.clock_offset_s,
        last_error=device.why_left or device.last_error,
    )


def _quarantine(member: Member, now_s: float, *, ordered: bool) -> Quarantine | None:
    """Return the cause and end of a member's quarantine, or `None` without one."""
    if ordered:
        return Quarantine("an operator's order", f"by 'edgeasync device release {member.device_id}'")
    if member.state != "quarantined":
        return None
    remaining_s = max(0.0, member.quarantined_until_s - now_s)
    return Quarantine("it sent too many malformed messages", f"in {remaining_s:.0f} s")
