"""The status fields of devices."""

from collections.abc import Callable, Iterable
from typing import Any

from edgeasync.core.hub.member import Member


def describe_devices(
    members: Iterable[Member],
    now_s: float,
    is_quarantined: Callable[[Member], bool],
    budget_of: Callable[[Member, float], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the entries of the devices in the status.

    `is_quarantined` returns whether an operator excluded a member. `budget_of` returns the fields
    of a member's quota.
    """
    return [
        {
            "id": member.device_id,
            **_quarantine(member, now_s, ordered=is_quarantined(member)),
            "staleness": member.measurements.staleness,
            "local_steps": member.measurements.local_steps,
            "last_seen_s": round(now_s - member.seen_s, 3),
            "examples_per_s": round(member.measurements.examples_per_s, 1),
            "pushes_answered": member.pushes_answered,
            "updates_applied": member.updates_applied,
            "updates_buffered": member.updates_buffered,
            "duplicates": member.duplicates,
            "updates_rejected": member.updates_rejected,
            "updates_shortened": member.updates_shortened,
            "weight_kept": round(member.weight_kept / member.weight, 3) if member.weight else None,
            "loss": member.measurements.last_loss,
            "pace_percent": member.pace_percent,
            "pace_reason": member.pace_reason,
            "temperature_c": member.temperature_c,
            "assigned_steps": member.measurements.assigned_steps,
            "why": member.measurements.why,
            "bound": member.measurements.bound,
            "step_s": round(member.measurements.step_s, 6),
            "talk_s": round(member.measurements.communication_s, 6),
            "talk_share": round(member.measurements.communication_share, 3),
            "period_s": round(member.measurements.period_s or member.measurements.cycle_s, 6),
            "push_codec": member.codec_push,
            "bytes_up": member.traffic.up_bytes + member.link.uncounted[0],
            "bytes_down": member.traffic.down_bytes + member.link.uncounted[1],
            **member.link.describe(),
            **budget_of(member, now_s),
        }
        for member in members
    ]


def _quarantine(member: Member, now_s: float, *, ordered: bool) -> dict[str, Any]:
    """Return a member's state and, if it is in quarantine, the cause and end of the quarantine."""
    if ordered:
        ends = f"by 'edgeasync device release {member.device_id}'"
        return {"state": "quarantined", "quarantine": {"cause": "an operator's order", "ends": ends}}
    if member.state != "quarantined":
        return {"state": member.shown_state, "quarantine": None}
    remaining_s = max(0.0, member.quarantined_until_s - now_s)
    cause = "it sent too many malformed messages"
    return {"state": member.state, "quarantine": {"cause": cause, "ends": f"in {remaining_s:.0f} s"}}
