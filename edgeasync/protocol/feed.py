"""The feed of a hub: what the page in the browser and other viewers show of a fleet.

A viewer first receives a whole `FeedUpdate`, and then at most one a second with the changes since
the previous one. All viewers receive the same bytes. Times are points in time by the hub's clock,
in seconds since 1970, so that an unchanged device need not be sent again.
"""

from typing import Literal

import msgspec

from edgeasync.protocol.status import DeviceState, DeviceStatus, HubSummary, RecentEvent

ATTENTION_MAX = 100
"""Maximum number of devices in `FeedUpdate.attention`."""

EVENTS_SHOWN = 200
"""Maximum number of events in a whole `FeedUpdate`."""

HISTORY_MAX = 2000
"""Maximum number of points of the history."""

Reason = Literal[
    "lost",
    "quarantined",
    "warned",
    "stuck",
    "hot",
    "paused",
    "rejected",
    "clipped",
    "slowed",
    "slow_link",
    "slow",
    "refused",
    "never_came",
]
"""Why a device needs attention, the most urgent reason first."""


class Attention(msgspec.Struct, frozen=True, gc=False):
    """A device that needs attention. `reason` is the most urgent one, and `words` describes all."""

    device: str
    """the device"""
    reason: Reason
    """the most urgent reason"""
    words: str
    """human-readable sentence with all reasons"""


class Notice(msgspec.Struct, frozen=True, gc=False):
    """What an operator must know about the whole fleet."""

    level: Literal["bad", "info"]
    """whether something is wrong"""
    words: str
    """human-readable sentence"""


class DeviceRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One device, sent as an array of these values in this order."""

    id: str
    """device id"""
    state: DeviceState
    """[the device's state](../concepts/states.md#a-member-of-the-hub)"""
    last_seen: int
    """time of its last message"""
    joined_at: int | None
    """time at which it last joined; null if it has not joined since the hub's start"""
    examples_per_s: float
    """moving average"""
    loss: float | None
    """mean loss of its last update; null if missing or not finite"""
    staleness: int
    """of its last update, in versions"""
    local_steps: int
    """of its last update"""
    updates_applied: int
    """updates that are part of the model"""
    updates_rejected: int
    """updates that never count"""
    period_s: float
    """median time between its last five updates"""
    talk_share: float
    """share of a cycle in which it communicates"""
    round_trip_s: float
    """median round trip of its pings; 0 before the first"""
    pace_percent: int
    """share of the time in which it trains: 100 at full pace, 0 while paused"""
    temperature_c: float | None
    """its hottest sensor at the last ping; null without a sensor"""
    machine: str
    """the board or computer, as the device reports it"""
    software: str
    """the device's version of edgeasync"""
    address: str
    """IP address of its last connection; empty if unknown"""
    clock_offset_s: float | None
    """its clock minus the hub's clock; null if unknown"""
    last_error: str
    """why it left, or else the hub's last refusal of a message or update; empty without one"""


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The progress of training at a time, sent as an array of these values in this order."""

    time: float
    """the time"""
    version: int
    """number of the newest version"""
    updates: int
    """updates folded into the model in this run"""
    loss: float | None
    """the devices' loss, as in `FleetStatus`; null without one"""
    evaluation_loss: float | None
    """loss of an evaluation that ended since the previous point; null without one"""
    evaluation_accuracy: float | None
    """its share of correct labels; null without one"""


class PendingKey(msgspec.Struct, frozen=True, gc=False):
    """An unknown key that has tried to connect."""

    fingerprint: str
    """the key's fingerprint"""
    address: str
    """IP address of its last attempt"""
    seen: int
    """time of its last attempt"""
    refused: bool
    """whether an operator has refused it"""


class FeedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet, or what has changed since the previous update.

    In a large fleet, an update contains a limited number of changed devices, and the others follow
    in later updates. A device whose state has changed comes first.
    """

    lineage: str
    """changes with each start of the hub; `number` then starts at 1 again"""
    number: int
    """number of the update"""
    previous: int
    """number of the update to which the changes apply; 0: this update is whole"""
    time: float
    """when the hub made the update"""
    summary: HubSummary
    """the [status](#edgeasync-status) without the devices, with at most 100 `alarms` and 100
    `enrolled_unseen`
    """
    notices: list[Notice]
    """what an operator must know about the whole fleet, the most urgent first"""
    denied: str
    """the connections that the hub refused, in words; empty without one"""
    counts: dict[str, int]
    """number of devices in each state"""
    attention: list[Attention]
    """the devices that need attention, the most urgent first, at most 100"""
    attention_count: int
    """number of all devices that need attention"""
    columns: list[str]
    """names of the values of `devices`; empty if the update is not whole"""
    devices: list[DeviceRow]
    """all devices, or the changed ones"""
    gone: list[str]
    """devices that the hub has forgotten since the previous update"""
    events: list[RecentEvent]
    """the latest 200 events, or the new ones, oldest first; evaluations are in `history` instead"""
    history: list[HistoryPoint]
    """all points of the history, at most 2,000, or the new ones"""
    pending: list[PendingKey] | None
    """unknown keys that have tried to connect; null if the hub has no keys"""


class DeviceDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one device."""

    time: float
    """when the hub described the device"""
    device: DeviceStatus | None
    """the device's entry of the status; null if its key may join, but it has not joined this run"""
    facts: list[tuple[str, str]]
    """the same in words, as names and values; empty without `device`"""
    attention: Attention | None
    """why it needs attention; null if it does not"""
    events: list[RecentEvent]
    """its latest events, at most 50, oldest first"""
