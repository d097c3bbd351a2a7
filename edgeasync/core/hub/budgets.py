"""Daily quotas: count bytes, and distribute them over the day. Part of `HubCore`.

A day is a period of 24 hours by the hub's clock, which stops while the hub is down. A device's own
quota uses the device's period instead, which it reports when it joins.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from edgeasync.core.hub.effects import HubEffect, HubReport
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.core.hub.traffic import Traffic
from edgeasync.measurements.medians import median
from edgeasync.policies.budget import EVEN_SPEND_RATE, LEARNING_SPEND_RATE, Allowance, period_s
from edgeasync.policies.codec_choice import bytes_per_value
from edgeasync.protocol.messages import DAY_S, HEADERS_BYTES, HEARTBEAT_BYTES
from edgeasync.protocol.status import TrafficStatus

REST_S_MIN = 0.1
"""Minimum wait that is sent to a device. A shorter wait would not be worth a message."""


class QuotaLeft(NamedTuple):
    """What is left of a daily quota, and the quota; both are `None` without a quota."""

    day_left_bytes: int | None
    bytes_per_day_max: int | None


class BudgetState(msgspec.Struct):
    """The durable fields of `Budgets`: the traffic of the whole run, including evicted devices."""

    traffic: Traffic = msgspec.field(default_factory=Traffic)


class Budgets:
    """Counts bytes, and computes how long devices must wait to stay within their quotas."""

    def __init__(self, settings: HubCoreSettings, members: Membership, values: int) -> None:
        limits = settings.limits
        self.state = BudgetState()
        self._members = members
        self._hub_max = _plain(limits.bytes_per_day_max)
        self._device_max = _plain(limits.device_bytes_per_day_max)
        self.metered = (self._hub_max, self._device_max) != (None, None)
        """Whether the hub has daily quotas."""
        self._pings_bytes_per_s = HEARTBEAT_BYTES / settings.liveness.heartbeat_s
        self._values = values
        self._has_warned = False
        """Whether the warning was shown. It is not durable, so that the warning is shown again
        after a restart.
        """

    def count(self, member: Member, moved: tuple[int, int], now_s: float) -> None:
        """Count the bytes that were received from a device and sent to it."""
        self.state.traffic.count(moved, now_s)
        member.traffic.count(moved, now_s)
        if member.own_day is not None:
            member.own_day.count(sum(moved), now_s)

    def begin_exchange(self, member: Member, now_s: float, is_learning: Callable[[], bool]) -> None:
        """Record that an assignment is sent, and set the earliest time of the next assignment."""
        traffic, measurements = member.traffic, member.measurements
        total_bytes = traffic.total_bytes
        if measurements.updates > member.exchange_updates:
            pings_bytes = (now_s - member.exchange_s) * self._pings_bytes_per_s
            traffic.note_exchange(total_bytes - member.exchange_bytes - pings_bytes)
        member.exchange_s, member.exchange_bytes = now_s, total_bytes
        member.exchange_updates = measurements.updates
        limited = self.metered or member.own_day is not None
        measurements.period_s_min = self._period_s(member, now_s, is_learning) if limited else 0.0

    def judge_shares(self, member: Member) -> list[HubEffect]:
        """Return a warning if the hub's quota is too small for the fleet.

        The warning is returned only once. The quota must cover the pings and one exchange a day of
        every live device, including this one.
        """
        if self._hub_max is None or self._has_warned:
            return []
        devices = self._members.live_count
        needed_bytes = self._most_bytes(member) + DAY_S * self._pings_bytes_per_s
        if self._hub_max >= devices * needed_bytes:
            return []
        self._has_warned = True
        share = (
            f"each may use {self._hub_max / devices / 1e6:.3g} MB a day, but its pings and one exchange may need"
        )
        cure = "Raise the limit, increase liveness.heartbeat_s, or use fewer devices"
        return [
            HubReport(
                "warning",
                detail=f"limits.bytes_per_day_max is too low for {devices} devices: {share} "
                f"{needed_bytes / 1e6:.3g} MB, so devices will idle. {cure}",
            )
        ]

    def rest_s(self, member: Member, now_s: float, is_learning: Callable[[], bool]) -> float:
        """Return how many seconds a device must wait before its next exchange.

        Return 0 if the device need not wait.
        """
        if not self.metered and member.own_day is None:
            return 0.0  # the usual case, checked for every answer
        allowances = self._allowances(member, now_s)
        due_s = now_s
        if member.measurements.updates > member.exchange_updates:
            due_s = member.exchange_s + self._period_s(member, now_s, is_learning)
        most_bytes = self._most_bytes(member)
        for allowance in allowances:  # check each one: a device's own day may end sooner than the hub's
            if allowance.left_bytes < most_bytes:
                due_s = max(due_s, now_s + allowance.remaining_s)
        rest_s = due_s - now_s
        return rest_s if rest_s >= REST_S_MIN else 0.0

    def _most_bytes(self, member: Member) -> float:
        """Return the maximum size of an exchange, which consists of a whole model and an update.

        Deltas are never larger than a whole model. For the update, assume the least compact of the
        device's codecs. The hub selects the codec by the link, and a replay does not know the link.
        """
        update = max(map(bytes_per_value, member.codecs_push), default=bytes_per_value("identity"))
        return self._values * (bytes_per_value(member.codec_model) + update) + HEADERS_BYTES

    def _period_s(self, member: Member, now_s: float, is_learning: Callable[[], bool]) -> float:
        """Return the minimum time between two exchanges that the quotas of a device allow."""
        if not member.traffic.exchanges:
            return 0.0
        allowances = self._allowances(member, now_s)
        usual_bytes = median(member.traffic.exchanges)
        spend_rate = LEARNING_SPEND_RATE if is_learning() else EVEN_SPEND_RATE
        return max([period_s(one, usual_bytes, spend_rate) for one in allowances])

    def _allowances(self, member: Member, now_s: float) -> list[Allowance]:
        """Return the remaining bytes of each quota that applies to a device.

        The hub's quota is divided equally among the devices.
        """
        allowances: list[Allowance] = []
        remaining_s = DAY_S - now_s % DAY_S
        if self._device_max is not None:
            left_bytes: float = member.traffic.left_bytes(self._device_max, now_s)
            allowances.append(self._allowance(left_bytes, remaining_s))
        if self._hub_max is not None:
            devices = max(1, self._members.live_count)
            left_bytes = self.state.traffic.left_bytes(self._hub_max, now_s)
            allowances.append(self._allowance(left_bytes / devices, remaining_s))
        if (own := member.own_day) is not None:
            left_bytes = own.left_bytes(member.profile.bytes_per_day_max, now_s)
            allowances.append(self._allowance(left_bytes, own.remaining_s(now_s)))
        return allowances

    def _allowance(self, left_bytes: float, remaining_s: float) -> Allowance:
        return Allowance(left_bytes - remaining_s * self._pings_bytes_per_s, remaining_s)

    def describe(self, now_s: float) -> TrafficStatus:
        """Return the hub's traffic for the status."""
        traffic = self.state.traffic
        return TrafficStatus(
            bytes_up=traffic.up_bytes,
            bytes_down=traffic.down_bytes,
            day_bytes=traffic.day_bytes(now_s),
            day_remaining_s=round(DAY_S - now_s % DAY_S, 3),
            bytes_per_day_max=self._hub_max,
            day_left_bytes=None if self._hub_max is None else traffic.left_bytes(self._hub_max, now_s),
        )

    def quota_left(self, member: Member, now_s: float) -> QuotaLeft:
        """Return a device's quota with the fewest remaining bytes."""
        left = []
        if self._device_max is not None:
            left.append((member.traffic.left_bytes(self._device_max, now_s), self._device_max))
        if (own := member.own_day) is not None:
            most = member.profile.bytes_per_day_max
            left.append((own.left_bytes(most, now_s), most))
        return min((QuotaLeft(*one) for one in left), default=QuotaLeft(None, None))


def _plain(nbytes: int | None) -> int | None:
    """Convert a limit to a plain `int` for the status."""
    return None if nbytes is None else int(nbytes)
