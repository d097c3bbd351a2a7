"""Answers status requests, in slices if there are many devices."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from edgeasync.core.engine.hub_shell import HubShell
from edgeasync.core.engine.learning_curve import LearningCurve
from edgeasync.core.engine.outbox import Outbox
from edgeasync.core.engine.recent_events import RecentEvents
from edgeasync.core.engine.sender import ANYBODY, Sender
from edgeasync.core.hub.effects import SendStatus
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import Member
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Status

DEVICES_AT_A_TIME = 256
"""Number of devices per slice. Describing a slice takes a few milliseconds."""

REFRESH_S, REFRESH_DEVICE_S = 1.0, 0.02
"""Minimum seconds between two descriptions that nobody requested: a fixed part, and a part per
device.
"""

SHARED_S, SHARED_DEVICE_S = 1.0, 0.001
"""Maximum age of a status that is sent to a client that watches: a fixed part, and a part per
device. Describing a device takes about 30 microseconds, so all watching clients together cost at
most 3 % of a core.
"""

Tell = Callable[[bytes], None]


class _Draft(NamedTuple):
    """A status that is being described; `parts` are the text so far."""

    tell: Tell
    now_s: float
    members: Sequence[Member]
    parts: list[bytes]
    is_whole: bool
    """Whether it has the entries of all devices."""


class StatusAnswers:
    """Describes the hub in answers, each of which waits until its content is durable.

    While the log cannot be written, the answer is the newest durable status, with the reason for
    the failure. If there are several slices, the hub is described at the time of the first slice,
    and each device at the time of its own slice.

    All clients that watch share one status, which is described at most once a second, and only if
    one of them asks.
    """

    def __init__(self, core: HubCore, shell: HubShell, outbox: Outbox) -> None:
        self._core = core
        self._shell = shell
        self._outbox = outbox
        self._waiting: dict[Tell, Callable[[], None]] = {}
        self._watching: list[Tell] = []
        self._standing_still = False
        self.events = RecentEvents()
        self.learning_curve = LearningCurve(core, shell.wall_s)
        self._refresh_at_s = 0.0
        self.shown = b""
        """The newest status that is durable. It was described at `shown_s`."""
        self.shown_s = 0.0

    def begin(self, now_s: float) -> None:
        """Describe the initial state of the hub, which is durable."""
        if not self.shown:
            self.shown = msgspec.json.encode(self._core.status(now_s) | self._shell.describe())

    def answer(self, request: SendStatus, sender: Sender, now_s: float, busy: Callable[[], None]) -> None:
        """Send a status or events; call `busy` if an order cannot be confirmed."""
        header = wire.encode(Status())

        def tell(text: bytes) -> None:
            self._shell.send(request.peer, header, text)

        if request.events_after is not None:
            tell(self.events.after(request.events_after, self._core.lineage, sender))
        elif request.confirms:  # an earlier durable status does not show the order
            self.ask(tell, sender, now_s, busy)
        elif request.watches and sender.role != "device":
            self.watch(tell, now_s)
        else:
            self.ask(tell, sender, now_s)

    def refresh(self, now_s: float) -> None:
        """Describe the hub at intervals, to answer requests while the log cannot be written."""
        if now_s >= self._refresh_at_s:
            self._refresh_at_s = now_s + REFRESH_S + REFRESH_DEVICE_S * len(self._core.members.members)
            self.ask(lambda _: None, ANYBODY, now_s)

    def watch(self, tell: Tell, now_s: float) -> None:
        """Call `tell` with a status that may be a second old, or more in a large fleet."""
        if self.shown and now_s < self.shown_s + SHARED_S + SHARED_DEVICE_S * len(self._core.members.members):
            tell(self.shown)
            return
        self._watching.append(tell)
        if len(self._watching) == 1:
            self.ask(self._tell_watching, ANYBODY, now_s)

    def _tell_watching(self, text: bytes) -> None:
        watching, self._watching = self._watching, []
        for tell in watching:
            tell(text)

    def ask(self, tell: Tell, sender: Sender, now_s: float, standing: Callable[[], None] | None = None) -> None:
        """Call `tell` with the status.

        The key of a device gets only the entries of its own devices. If the log fails before the
        status is durable, call `standing` instead, or `tell` with the newest durable status.
        """
        standing = standing or partial(self._tell_standing, tell, sender)
        if self._standing_still:
            standing()
            return
        self._waiting[tell] = standing
        own = sender.key if sender.role == "device" else b""
        members = self._core.members.of_key(own) if own else list(self._core.members.members.values())
        status = self._core.describe(members, now_s) | self._shell.describe()
        if own:
            status = _own(msgspec.to_builtins(status), sender)
        fields = msgspec.json.encode({**status, "devices": []}).removesuffix(b"]}")
        self._describe(_Draft(tell, now_s, members, [fields], is_whole=not own), 0)

    def _describe(self, draft: _Draft, begin: int) -> None:
        """Describe a slice of the devices and then, after other events, the next one."""
        end = begin + DEVICES_AT_A_TIME
        devices = self._core.describe_devices(draft.members[begin:end], draft.now_s)
        draft.parts.append(msgspec.json.encode(devices)[1:-1])
        if end < len(draft.members):
            draft.parts.append(b",")
            self._shell.after(0.0, partial(self._describe, draft, end))
        else:
            text = b"".join([*draft.parts, b"]}"])
            self._outbox.show(partial(self._show, draft.tell, text, draft.now_s if draft.is_whole else None))

    def _show(self, tell: Tell, text: bytes, described_s: float | None) -> None:
        """Pass a durable status to `tell`; `described_s` is `None` for a part of one."""
        if described_s is not None:
            self.shown, self.shown_s = text, described_s
        if self._waiting.pop(tell, None) is not None:
            tell(text)

    def _tell_standing(self, tell: Tell, sender: Sender) -> None:
        """Call `tell` with the newest durable status, while the log cannot be written."""
        status = msgspec.json.decode(self.shown, type=dict[str, Any]) | self._shell.describe()
        if sender.role == "device":
            devices = [device for device in status["devices"] if sender.speaks_for(device["id"])]
            status = _own({**status, "devices": devices}, sender)
        tell(msgspec.json.encode(status))

    def stand_still(self) -> None:
        """Answer all waiting requests, because the log cannot be written; see `resume`."""
        self._standing_still = True
        waiting, self._waiting = self._waiting, {}
        for standing in waiting.values():
            standing()

    def resume(self) -> None:
        """Describe the hub again, because the log can be written again."""
        self._standing_still = False


def _own(status: Mapping[str, Any], sender: Sender) -> dict[str, Any]:
    """Return those fields of a status that the key of a device may see."""
    alarms = {
        key: [alarm for alarm in status[key] if not alarm["device"] or sender.speaks_for(alarm["device"])]
        for key in ("alarms", "alarms_past")
    }
    return {**status, **alarms, "denied": {}, "enrolled_unseen": [], "refused": {}}
