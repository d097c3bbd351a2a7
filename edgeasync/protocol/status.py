"""The payload of a `Status`: the object that `edgeasync status --json` prints.

The hub's parts create these structs. Links in the descriptions are relative to `docs/reference/`.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from edgeasync.structs import resolve_type


class EvaluationStatus(msgspec.Struct, frozen=True, gc=False):
    """An evaluation of a version: `evaluation` is the last one, and `best` the best one."""

    version: int
    """number of the evaluated version"""
    loss: float | None
    """mean loss"""
    accuracy: float | None
    """share of correct labels; null without labels or held-out data"""


class CadenceStatus(msgspec.Struct, frozen=True, gc=False):
    """Time between exchanges of a device."""

    period_s: float
    """median of the devices' `period_s`, not counting infrequent devices; 0: not measured yet"""
    aim_s: float
    """the controller's target period, before its bounds"""
    bound: str
    """the most common `bound` of the devices, if at least half of the devices have one; otherwise
    empty
    """
    gain: float
    """factor on the part of the period that is not communication; 1: not shortened"""
    cause: str
    """why `gain` is below 1; otherwise empty"""
    warming_up: bool
    """whether the warm-up's policies apply"""
    resting: bool
    """whether the fleet is idle: its period is at least twice that at full pace"""
    rest_period_s: float
    """time between two exchanges of a device while the fleet is idle; otherwise 0"""
    still_s: float
    """seconds without an improvement of the model, up to the last check; always 0 without
    `hub.quiet`
    """
    rest_cause: str
    """why the fleet last returned to full pace; empty if it was never idle"""


class FleetStatus(msgspec.Struct, frozen=True, gc=False):
    """Measurements of all devices together."""

    staleness_mean: float
    """moving average of the staleness, in versions"""
    agreement: float | None
    """moving average of the mean cosine between updates of one fold; null before the first such
    fold, or if no policy uses it
    """
    loss: float | None
    """median of the last 16 notes. A note is the median of the voters' newest losses"""
    loss_variance: float | None
    """the same for the variance of the losses within an update"""


class AlarmCause(msgspec.Struct, frozen=True, gc=False):
    """One cause of an alarm."""

    cause: str
    """the detector's last finding, human-readable"""
    since_s: float
    """seconds since its first finding"""
    updates: int
    """updates with this finding"""
    figures: dict[str, float | None]
    """figures of the last finding: `loss` and `fleet_loss`, `times_usual`, `loss_variance`,
    `usual`, `cosine`, or those of [your detector](../train/plugins.md#what-is-alarming)
    """


class ActiveAlarm(msgspec.Struct, frozen=True, gc=False):
    """An active alarm."""

    device: str
    """the device; empty: the fleet"""
    cause: str
    """human-readable cause"""
    remedy: str
    """the hub's action until the alarm ends. Fleet: `alert`, `increase_frequency`, `reduce_lr`,
    `reduce_local_lr` or `rollback`. Device: `alert`, `probation` under `trust = "open"`, or
    `excluded` by an operator
    """
    since_s: float
    """seconds since it began"""
    causes: list[AlarmCause]
    """findings of each detector"""


class EndedAlarm(msgspec.Struct, frozen=True, gc=False):
    """An alarm that has ended."""

    device: str
    """the device; empty: the fleet"""
    cause: str
    """human-readable cause"""
    ended_ago_s: float
    """seconds since it ended"""
    duration_s: float
    """how long it lasted"""


class TrafficStatus(msgspec.Struct, frozen=True, gc=False):
    """Traffic of all devices, and the daily quota."""

    bytes_up: int
    """bytes of all messages from devices in this run, including those before a restart"""
    bytes_down: int
    """the same, to devices"""
    day_bytes: int
    """bytes of the hub's current day, both directions"""
    day_remaining_s: float
    """seconds until the hub's next day"""
    bytes_per_day_max: int | None
    """daily quota of all devices together; null: no limit"""
    day_left_bytes: int | None
    """bytes left of that quota"""


DeviceState = Literal["joining", "training", "paused", "lost", "left", "quarantined"]
"""A device's state, as shown to users."""


class Quarantine(msgspec.Struct, frozen=True, gc=False):
    """Why a device's updates do not count."""

    cause: str
    """human-readable cause"""
    ends: str
    """human-readable end"""


class DeviceStatus(msgspec.Struct, frozen=True, gc=False):
    """One device that the hub knows."""

    id: str
    """device id"""
    state: DeviceState
    """[the device's state](../concepts/states.md#a-member-of-the-hub)"""
    quarantine: Quarantine | None
    """set while the device is excluded by an operator or for malformed messages"""
    staleness: int
    """of its last update, in versions"""
    local_steps: int
    """of its last update"""
    last_seen_s: float
    """seconds since its last message"""
    examples_per_s: float
    """moving average"""
    pushes_answered: int
    """the sum of the next four"""
    updates_applied: int
    """updates that are part of the model"""
    updates_buffered: int
    """updates that wait for the next version"""
    duplicates: int
    """repeated pushes"""
    updates_rejected: dict[str, int]
    """updates that never count, by [reason](wire/messages.md#outcomes)"""
    updates_shortened: int
    """updates clipped to less than half of their length"""
    weight_kept: float | None
    """share of its updates' weight left after clipping; null before the first"""
    loss: float | None
    """mean loss of its last update; null if missing or not finite"""
    pace_percent: int
    """share of the time in which it trains: 100 at full pace, 0 while paused"""
    pace_reason: str
    """human-readable reason for a pace below 100; otherwise empty"""
    temperature_c: float | None
    """its hottest sensor at the last ping; null without a sensor"""
    assigned_steps: int
    """local steps of its last assignment; 0 before the first"""
    why: str
    """human-readable reason for that number of steps"""
    bound: str
    """what keeps it from the controller's target: `local_steps_min`, `local_steps_max`,
    `epochs_max`, `change` (steps at most double or halve), `device` (its own `local_steps_max`), or
    empty
    """
    step_s: float
    """time of a local step, reported by the device"""
    talk_s: float
    """communication time of a cycle, without computing and waits for a flush"""
    talk_share: float
    """`talk_s` over `talk_s` plus the computing of the assigned steps"""
    period_s: float
    """median time between its last five updates, waits for a flush included"""
    push_codec: str
    """codec of its updates"""
    bytes_up: int
    """bytes of all its messages in this run, including those before a restart"""
    bytes_down: int
    """bytes of all messages to it"""
    round_trip_s: float
    """median round trip of its pings; 0 before the first"""
    bandwidth_bytes_per_s: int
    """estimated rate of its link; 0 before the first estimate"""
    day_bytes: int
    """bytes of the hub's current day, both directions"""
    bytes_per_day_max: int | None
    """its daily quota, from the hub or its own; null: no limit"""
    day_left_bytes: int | None
    """bytes left of that quota"""
    rest_s: float
    """seconds until its next exchange if the quota delays it; otherwise 0"""
    stalled_s: float
    """seconds without a local step since it joined, not counting waits for the hub; 0 if it is not
    connected
    """
    machine: str
    """the board or computer, as the device reports it"""
    software: str
    """the device's version of edgeasync"""
    address: str
    """IP address of its last connection since the hub's start; empty if unknown"""
    joined_s: float | None
    """seconds since it last joined; null if it has not joined since the hub's start"""
    clock_offset_s: float | None
    """its clock minus the hub's clock, as the device reports it; null if unknown"""
    why_left: str
    """why it is not connected, since the hub's start; empty if it is connected"""
    last_error: str
    """why the hub last refused a message or an update of it, since the hub's start; empty if it has
    not
    """
    last_error_s: float | None
    """seconds since then"""


class JournalStatus(msgspec.Struct, frozen=True, gc=False):
    """The hub's journal."""

    entries: int
    """number of the last entry"""
    bytes: int
    """bytes written since the start"""
    syncs: int
    """syncs since the start"""


class HubSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a hub without its devices."""

    lineage: str
    """lineage of the newest version"""
    version: int
    """number of the newest version"""
    pushes_answered: int
    """`updates_applied` + `updates_rejected` + `updates_buffered` + `duplicates`"""
    updates_applied: int
    """updates folded into the model in this run"""
    updates_rejected: int
    """updates that never count"""
    updates_buffered: int
    """updates that wait for the next version"""
    duplicates: int
    """repeated pushes"""
    messages_accepted: dict[str, int]
    """accepted messages by kind"""
    messages_refused: int
    """refused messages"""
    messages_ignored: int
    """messages that arrived after training had ended"""
    refused: dict[str, str]
    """devices that the hub has refused to admit during the last ten minutes, with the reason"""
    cadence: CadenceStatus
    """time between exchanges"""
    fleet: FleetStatus
    """measurements of all devices together"""
    learning_rate_factor: float
    """factor on the hub's learning rate: 1, or lower after plateaus, remedies and rollbacks"""
    rollbacks: int
    """number of rollbacks"""
    evaluation: EvaluationStatus | None
    """last evaluation"""
    best: EvaluationStatus | None
    """best evaluation in this run folder"""
    alarms: list[ActiveAlarm]
    """active alarms, at most one per device"""
    alarms_past: list[EndedAlarm]
    """the last 32 ended alarms, oldest first"""
    traffic: TrafficStatus
    """traffic of all devices and the daily quota"""
    address: str
    """where the hub listens"""
    pid: int
    """the hub's process"""
    uptime_s: float
    """seconds since the hub started"""
    model_file: str
    """absolute path of `model.safetensors`"""
    parameters: int
    """values in the model's vector"""
    durability: str
    """`journal` or `checkpoint`"""
    version_durable: int | None
    """with `checkpoint`: version of the newest checkpoint; null with `journal`"""
    disk_trouble: str
    """why the journal or the last checkpoint could not be written; empty if it could"""
    denied: dict[str, int]
    """connections and messages turned away since the start, by reason:
    [Keys](../operate/keys.md#refused-connections) and [Bounds](../operate/bounds.md#the-bounds)
    list the reasons
    """
    enrolled_unseen: list[str]
    """names of devices whose key may join, but that have not joined this run"""
    journal: JournalStatus | None
    """null without a journal"""


class HubStatus(HubSummary, frozen=True, kw_only=True):
    """The status of a hub."""

    devices: list[DeviceStatus]
    """all devices that the hub knows"""


class RecentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a hub. [Events of a hub](../operate/events.md#events-of-a-hub) lists the names."""

    number: int
    """number of the event since the start of the hub"""
    event: str
    """the event's name"""
    time: float
    """seconds since 1970, by the hub's clock"""
    device: str
    """the device; empty if the event concerns the whole hub"""
    detail: str
    """human-readable sentence, which may change"""
    figures: dict[str, float | None] | UnsetType = UNSET
    """only of an `alarm`: figures of the finding, if there are any"""


class RecentEventList(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a hub since a number.

    `lineage` changes with each start of the hub, and the numbers then start at 1 again. `last` is
    the number of the newest event. The hub no longer has the first `missed` of the events.
    """

    lineage: str
    last: int
    missed: int
    events: list[RecentEvent]


def read_status(status: dict[str, Any]) -> HubStatus:
    """Convert a decoded status. Raises `ValueError` if it is not from a hub of this version."""
    return msgspec.convert(status, resolve_type(HubStatus))
