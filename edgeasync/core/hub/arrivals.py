"""Decides which devices may join or rejoin, and which devices to evict for them.

The state folder of an agent stores a random *state id*. Each start of an agent on this folder is a
new *incarnation*. If two agents have the same state id, the one with the higher incarnation wins. A
new state id (for example, of a reflashed card) is admitted only if the device with the old one is
not live. The hub then adopts the push number that the device reports, and remembers the old state
id as retired.
"""

import math
from typing import Literal

from edgeasync.core.hub.events import Peer
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.refusal import MALFORMED, RefusalError
from edgeasync.core.hub.traffic import OwnDay
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.measurements.medians import add_recent
from edgeasync.protocol.messages import COUNT_MAX, DAY_S, DeviceProfile, Hello, Key

Arrival = Literal["joined", "rejoined", "reconnected"]
"""How a device became a member when it sent its `Hello`."""

RETIRED_STATES_MAX = 8

SHARE = 4
"""One key may use `limits.devices_max / SHARE` device ids."""


class Arrivals:
    """Admits devices to the membership. `Admission` creates it."""

    def __init__(self, members: Membership, devices_max: int) -> None:
        self._members = members
        self._devices_max = devices_max

    def greet(
        self, hello: Hello, peer: Peer, session: bytes, now_s: float, key: Key = b""
    ) -> tuple[Member, Arrival]:
        """Admit a device; return its member, and whether it joined, rejoined or reconnected.

        Raises `RefusalError` if the device id belongs to another key, the incarnation is outdated,
        the state is retired, another state is live, or the hub is full.
        """
        member = self._members.members.get(hello.device_id)
        if member is None:
            self._make_place(key, now_s)
            measurements = DeviceMeasurements(examples=hello.profile.examples)
            member = Member(
                hello.device_id,
                hello.state_id,
                hello.incarnation,
                hello.profile,
                measurements,
                seq_last=_seq_before(hello),
            )
            self._members.add(member)
            event: Arrival = "joined"
        else:
            if key and member.key not in (b"", key):
                raise RefusalError(
                    "not_allowed",
                    f"device id {hello.device_id} belongs to another key; choose another name with --device-id "
                    "(name= in Python)",
                )
            event = self._readmit(member, hello, peer, now_s)
            if member.state == "quarantined":
                member.strikes = 0
        self._members.change_key(member, key)
        member.profile = hello.profile
        member.own_day = _own_day(hello.profile, now_s)
        member.fast_link.greet(same_host=hello.profile.same_host)
        member.piece_bytes_max = hello.piece_bytes_max
        member.measurements.examples = hello.profile.examples
        member.measurements.local_steps_max = hello.profile.local_steps_max
        member.measurements.updated_s = 0.0
        member.assigned = member.version = member.held = None
        self._members.open_session(member, session)
        self._members.bind(member, peer)
        self._members.end_wait(member)
        self._members.set_pace(member, 100, "")
        if event != "reconnected":
            member.rest_until_s = 0.0
            member.notes.joined_s = now_s
        elif member.notes.joined_s is None:  # the hub was restarted
            member.notes.joined_s = now_s
        member.notes.why_left = ""
        member.steps_total = 0
        member.progress_s = now_s
        self._members.renew(member, now_s)
        self._members.revive(member)
        return member, event

    def _readmit(self, member: Member, hello: Hello, peer: Peer, now_s: float) -> Arrival:
        """Admit a known device again.

        Raises `RefusalError` if the incarnation is outdated, if another device with the same state
        id is live, or if the device is in quarantine.
        """
        if member.state == "quarantined" and now_s < member.quarantined_until_s:
            raise RefusalError(
                "quarantined",
                MALFORMED.format(member.device_id),
                member.quarantined_until_s - now_s,
            )
        if hello.state_id != member.state_id:
            self._replace_state(member, hello, now_s)
            return "rejoined"
        if hello.incarnation < member.incarnation:
            raise RefusalError(
                "superseded",
                f"a newer agent has used the state of {member.device_id}; stop one of the two, or delete the "
                "copied state folder",
            )
        if hello.incarnation == member.incarnation and member.live:
            same = hello.session == member.session or peer == member.peer or member.state == "joining"
            if not same:
                raise self._duplicate(member, now_s)
            return "reconnected"
        member.incarnation = hello.incarnation
        return "rejoined"

    def _replace_state(self, member: Member, hello: Hello, now_s: float) -> None:
        """Bind the device id to a new state id.

        Raises `RefusalError` if the new state is retired or the old one is live.
        """
        if hello.state_id in member.retired:
            raise RefusalError(
                "retired_state",
                f"a newer state folder has replaced this one for {member.device_id}; delete this state folder",
            )
        if member.live:
            raise self._duplicate(member, now_s)
        add_recent(member.retired, member.state_id, RETIRED_STATES_MAX)
        member.state_id = hello.state_id
        member.incarnation = hello.incarnation
        member.seq_last = hello.seq_answered
        member.outcome_last = member.checksum_last = None

    def _duplicate(self, member: Member, now_s: float) -> RefusalError:
        return RefusalError(
            "duplicate_device_id",
            f"a device named {member.device_id} is already connected; choose another name with --device-id "
            "(name= in Python)",
            max(0.0, member.lease_until_s - now_s),
        )

    def _make_place(self, key: Key, now_s: float) -> None:
        """Evict a member that is not live if the hub or the key has reached its limit.

        If the key has reached its limit, one of its own members is evicted. Otherwise, a member of
        the key with the most members is evicted. Raises `RefusalError` if no member can be evicted.
        """
        share = math.ceil(self._devices_max / SHARE)
        crowding = self._members.names_of(key) >= share
        if len(self._members.members) < self._devices_max and not crowding:
            return
        silent = [
            member
            for member in (self._members.of_key(key) if crowding else self._members.members.values())
            if not member.live and (member.state != "quarantined" or now_s >= member.quarantined_until_s)
        ]
        if not silent:
            why = f"key limit reached: one key may have {share} devices" if crowding else "the hub is full"
            raise RefusalError(
                "hub_full", f"{why} (limits.devices_max = {self._devices_max} at the hub)", self._members.lease_s
            )
        self._members.forget(min(silent, key=lambda member: (-self._members.names_of(member.key), member.seen_s)))


def _seq_before(hello: Hello) -> int:
    """Return the number that precedes the first push of an unknown device.

    A device that has a session was a member until the hub evicted it. Its next push may have
    counted before the eviction, so the number of that push must not be used again.
    """
    return min(hello.seq_answered + (hello.session is not None), COUNT_MAX)


def _own_day(profile: DeviceProfile, now_s: float) -> OwnDay | None:
    """Return the daily quota that a device reports, or `None` if it has no quota."""
    most = profile.bytes_per_day_max
    if not most:
        return None
    return OwnDay(most - min(profile.day_left_bytes, most), now_s + min(profile.day_remaining_s, DAY_S))
