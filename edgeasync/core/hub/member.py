"""One device as the hub knows it: its identity, session, pushes and counters."""

from typing import Literal

import msgspec

from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.fast_link import FastLink
from edgeasync.core.hub.link import LinkEstimate
from edgeasync.core.hub.reported_stats import ReportedStats, clamp
from edgeasync.core.hub.traffic import OwnDay, Traffic
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.protocol.messages import DeviceProfile, FirstOutcome, Key, ModelVersion, Push
from edgeasync.states import Table, check_move

DeviceState = Literal["joining", "training", "paused", "lost", "left", "quarantined"]

MEMBER: Table[DeviceState] = {
    "left": ("joining", "quarantined"),
    "joining": ("training", "paused", "lost", "left", "quarantined"),
    "training": ("paused", "joining", "lost", "left", "quarantined"),
    "paused": ("training", "joining", "lost", "left", "quarantined"),
    "lost": ("joining", "quarantined"),
    "quarantined": ("joining",),
}
"""Allowed changes of a member's state.

A `paused` device does not take local steps. A device is `lost` when its lease has expired. Messages
of a `quarantined` device are ignored.
"""

LIVE: tuple[DeviceState, ...] = ("joining", "training", "paused")
"""The states of a device with a valid lease."""

Owner = tuple[str, bytes]
"""The device id and the state id, which together identify the owner of a transfer on any
connection.
"""

STEPS_UNASSIGNED = 8
"""Number of assigned local steps to assume if the hub has evicted the device, and so has lost the
record of its assignment.
"""

SHORTENED = 0.5
"""If clipping reduces the norm of an update below this fraction, the update counts as shortened."""


class Notes(msgspec.Struct):
    """What happened to a device since the hub's start, for users.

    The device joined at `joined_s`. `why_left` is why it is not connected. `error` is why the hub
    last refused a message or an update of it, at `error_s`.
    """

    joined_s: float | None = None
    why_left: str = ""
    error: str = ""
    error_s: float | None = None

    def note_error(self, words: str, now_s: float) -> None:
        """Record why a message or an update was refused."""
        self.error, self.error_s = words, now_s


class Member(msgspec.Struct, array_like=True, dict=True, eq=False):
    """One device that the hub knows, live or not.

    All fields are durable. These other attributes are not durable:

    - `link`, `codec_push` and the counters used to select the codec: after a restart, the hub
      measures the link again.
    - `held`, the checksum that the device reported for `version`, and `coarse`, which determines
      whether the device may get a coarse whole model: both belong to a session.
    - `voter`, which is derived from the key.
    - `notes`, which are only shown to users.
    """

    device_id: str
    state_id: bytes
    incarnation: int
    profile: DeviceProfile
    measurements: DeviceMeasurements
    seq_last: int = 0
    outcome_last: FirstOutcome | None = None
    session: bytes = b""
    peer: Peer = b""
    state: DeviceState = "left"
    codec_model: str = "identity"
    codecs_push: tuple[str, ...] = ()
    follows: bool = False
    piece_bytes_max: int = 0
    version: ModelVersion | None = None
    retired: list[bytes] = []
    seen_s: float = 0.0
    lease_until_s: float = 0.0
    progress_s: float = 0.0
    quarantined_until_s: float = 0.0
    steps_total: int = 0
    strikes: int = 0
    updates_applied: int = 0
    waiting: bool = False
    assigned: ModelVersion | None = None
    assigned_s: float = 0.0
    checksum_last: int | None = None
    key: Key = b""
    steps_assigned: int = 0
    """The largest number of local steps in an assignment since the device's last push.

    `steps_before` is the largest number in the assignments before that push.
    """
    steps_before: int = 0
    updates_rejected: dict[str, int] = {}
    updates_shortened: int = 0
    """The number of the device's updates that were clipped to less than half of their norm."""
    updates_long: int = 0
    """The number of the device's updates whose norm exceeded the limit when they were folded."""
    weight: float = 0.0
    """The sum of the weights of the device's folded updates before clipping.

    `weight_kept` is the sum of the weights after clipping.
    """
    weight_kept: float = 0.0
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    own_day: OwnDay | None = None
    rest_until_s: float = 0.0
    exchange_s: float = 0.0
    """The time at which the last exchange began.

    `exchange_bytes` and `exchange_updates` are the counts at that time.
    """
    exchange_bytes: int = 0
    exchange_updates: int = 0
    pace_percent: int = 100
    """The percentage of time during which the device trains, as it reports; 0 while paused.
    `pace_reason` is the reason that the device reports.
    """
    pace_reason: str = ""
    temperature_c: float | None = None
    pushes_answered: int = 0
    """The number of the device's answered pushes. `duplicates` counts those of them that had been
    answered before.
    """
    duplicates: int = 0
    fast_link: FastLink = msgspec.field(default_factory=FastLink)

    def __post_init__(self) -> None:
        self.link = LinkEstimate()
        self.codec_push = "identity"
        self.codec_asked, self.codec_changed = 0, False
        self.held: int | None = None
        self.coarse = False
        self.notes = Notes()
        self.give_to(self.key)

    def give_to(self, key: Key) -> None:
        """Set the key that owns the device, or no key."""
        self.key = key
        self.voter = key.hex() if key else self.device_id
        """The voter that votes for the device and owns its transfer slots: its key or, without
        keys, its device id.
        """

    def count_folded(self, weight: float, clip: float) -> None:
        """Count a folded update with its weight and clip factor."""
        self.updates_applied += 1
        self.updates_shortened += clip < SHORTENED
        self.weight += weight
        self.weight_kept += weight * clip

    @property
    def updates_buffered(self) -> int:
        """The number of the device's updates that are still buffered."""
        return self.pushes_answered - self.duplicates - self.updates_applied - sum(self.updates_rejected.values())

    @property
    def owner(self) -> Owner:
        """The owner of this device's transfers, until the device gets another state id."""
        return self.device_id, self.state_id

    @property
    def live(self) -> bool:
        """Whether the device has a valid lease."""
        return self.state in LIVE

    @property
    def pauses(self) -> bool:
        """Whether the device has a valid lease, but reports that it does not take steps."""
        return self.live and not self.pace_percent

    def stalled_s(self, now_s: float) -> float:
        """Return the seconds since the device joined or took a local step, not counting waits.

        It is 0 if the device has no valid lease.
        """
        if self.waiting or not self.live:
            return 0.0
        return max(0.0, now_s - max(self.progress_s, self.rest_until_s))

    @property
    def shown_state(self) -> DeviceState:
        """The state as shown to users.

        A device that said goodbye because of a pause is shown as `paused`.
        """
        return "paused" if self.state == "left" and not self.pace_percent else self.state

    def move(self, state: DeviceState) -> None:
        """Change the state; raises `TransitionError` if `MEMBER` does not allow it."""
        check_move(MEMBER, self.state, state, "a member")
        self.state = state

    def assign(self, version: ModelVersion, local_steps: int, now_s: float) -> None:
        """Record an assignment. The device may train on it or on an earlier assignment."""
        self.assigned, self.assigned_s = version, now_s
        self.steps_assigned = max(self.steps_assigned, local_steps)
        self.link.begin_cycle()
        self.fast_link.begun_bytes = self.traffic.total_bytes

    def observe(self, push: Push, now_s: float, *, overlap_steps_max: int, slack_s: float) -> ReportedStats:
        """Record statistics and timing of a device's training.

        Return the statistics limited to plausible values.
        """
        cycle_s = now_s - self.assigned_s if push.base == self.assigned else None
        # An assignment sent before the last push may have arrived after it.
        steps_max = max(self.steps_assigned, self.steps_before) or STEPS_UNASSIGNED
        self.steps_assigned, self.steps_before = 0, self.steps_assigned
        if delay_steps := self.profile.delay_steps:
            overlap_steps_max = max(overlap_steps_max, min(delay_steps, steps_max))
        stats = clamp(
            push,
            steps_max=steps_max,
            overlap_steps_max=overlap_steps_max,
            examples_told=self.profile.examples,
            cycle_s=cycle_s,
            slack_s=slack_s,
        )
        if cycle_s is not None:
            communication_s = cycle_s - (stats.local_steps - stats.overlap_steps) * stats.step_s
            self.link.end_cycle(communication_s)
            self.fast_link.observe(self.traffic.total_bytes, communication_s)
        self.assigned = None
        self.measurements.observe_arrival(now_s)
        self.measurements.observe(
            cycle_s=cycle_s,
            score=stats.score,
            base_loss=stats.base_loss,
            local_steps=stats.local_steps,
            overlap_steps=stats.overlap_steps,
            examples=stats.examples,
            step_s=stats.step_s,
            loss_mean=stats.loss_mean,
            loss_variance=stats.loss_variance,
        )
        return stats
