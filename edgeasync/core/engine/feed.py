"""The feed: what all viewers of a fleet see, described once a second and encoded once.

Nothing is described or recorded while nobody waits for an update. Otherwise, the feed describes the
devices that changed, a limited number a second, and those that are listed as needing attention. It
does so in slices, between which the hub handles messages. An update is sent only after everything
in it is durable. While the log cannot be written, updates contain only new events and the reason.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from edgeasync.core.engine.feed_rows import Described, FleetRows, alarms_of_devices, usual_now
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.core.engine.recent_events import raw_list
from edgeasync.core.hub.attention import absent_devices, look_at
from edgeasync.core.hub.changes import Changes
from edgeasync.core.hub.device_words import device_lines
from edgeasync.core.hub.fleet_words import denied_words, find_notices
from edgeasync.protocol.feed import ATTENTION_MAX, EVENTS_SHOWN, Attention, DeviceRow, PendingKey
from edgeasync.protocol.status import DeviceStatus, HubSummary

EVERY_S = 1.0
"""Seconds between two updates."""

CHANGES_MAX = 350
"""Maximum number of changed devices in an update. Describing and encoding one takes about 25
microseconds, so an update takes about 1 % of a core.
"""

SLICE = 50
"""Number of devices to describe before the hub handles other events."""

IDLE_S = 5.0
"""The feed stops when nobody has waited for an update for this long."""

KEPT_UPDATES = 10
"""Number of latest updates to keep for viewers that are late. A later one receives a whole update."""

CLOCK_S = 2.0
"""If the hub's wall clock is set by more than this, all devices are described again."""

LISTED_MAX = 100
"""Maximum number of alarms, and of devices that never came, in the summary of an update."""

EVENTS_OF_DEVICE = 50
"""Maximum number of events in the details of a device."""

COLUMNS = list(DeviceRow.__struct_fields__)

Tell = Callable[[bytes], None]


class FleetTotals(NamedTuple):
    """The status without devices, and the number of devices in each state."""

    summary: HubSummary
    counts: dict[str, int]


class FeedShell(Protocol):
    """What the feed needs from the hub's shell."""

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` on the event loop after a delay."""

    def describe(self) -> dict[str, Any]:
        """Return those fields of the status that only the shell knows."""

    def now_s(self) -> float:
        """Return the time of the core's clock."""

    def wall_s(self) -> float:
        """Return the seconds since 1970."""

    def pending_keys(self) -> list[PendingKey] | None:
        """Return the unknown keys that have tried to connect; `None` if the hub has no keys."""


class _Waiting(NamedTuple):
    """A viewer that has received the update with the number `after`, or -1 for none."""

    after: int
    tell: Tell


class _View(NamedTuple):
    """The parts of an update that are sent even if they have not changed."""

    time: float
    summary: dict[str, Any]
    attention: list[Attention]
    attention_count: int
    pending: list[PendingKey] | None
    point: int
    """number of the newest point of the learning curve"""


class Feed:
    """Makes the updates of a hub. Use it on the event loop.

    `whole` and `after` call `tell` with an encoded `FeedUpdate`, at once or later.
    """

    def __init__(self, engine: HubEngine, shell: FeedShell) -> None:
        self._engine = engine
        self._core = engine.core
        self._members = engine.core.members
        self._shell = shell
        self._events, self._curve = engine.status_answers.events, engine.status_answers.learning_curve
        self._waiting: list[_Waiting] = []
        self._run = 0
        self.number = 0
        """The number of the newest update."""
        self._totals: tuple[float, FleetTotals] | None = None
        self._forget()

    def _forget(self) -> None:
        """Stop, and drop everything that the next start describes again."""
        self.active = False
        self._run += 1
        self._members.changes = None
        self._rows = FleetRows(self._core, self._shell.wall_s() - self._shell.now_s())
        self._kept: deque[bytes] = deque(maxlen=KEPT_UPDATES)
        self._whole = b""
        self._view: _View | None = None
        self._drafting = False
        self._unknown = True
        """Whether all devices must be described again."""
        self._idle_s = 0.0
        self._event = self._point = 0

    # -- viewers ---------------------------------------------------------------------------------------------

    def whole(self, tell: Tell) -> None:
        """Call `tell` with a whole update."""
        if self._view is None:
            self._wait(-1, tell)
        else:
            tell(self._encode_whole(self._view))

    def after(self, number: int, tell: Tell) -> None:
        """Call `tell` with the updates after a number, one per line, or with a whole update."""
        if self._view is None or number == self.number:
            self._wait(number, tell)
        else:
            tell(self._since(number, self._view))

    def device(self, name: str, tell: Tell) -> None:
        """Call `tell` with the details of a device, or with nothing if the hub does not know it."""
        now_s = self._shell.now_s()
        member = self._members.members.get(name)
        device, attention = None, None
        if self._engine.halted:
            shown = msgspec.json.decode(self._engine.status_answers.shown, type=_Devices)
            device = next((one for one in shown.devices if one.id == name), None)
        elif member is not None:
            (device,) = self._core.describe_devices([member], now_s)
        if device is not None:
            found = look_at(device, alarms_of_devices(self._core, now_s).get(name), usual_now(self._core))
            attention = None if found is None else found[1]
        else:
            refused, unseen = self._absent(self._summary(now_s))
            if name not in refused and name not in unseen:
                tell(b"")
                return
            attention = next(one for one in absent_devices(refused, unseen) if one.device == name)
        text = msgspec.json.encode(
            {
                "time": round(self._shell.wall_s(), 3),
                "device": device,
                "facts": [] if device is None else [*device_lines(device)],
                "attention": attention,
                "events": self._events.of_device(name, EVENTS_OF_DEVICE),
            }
        )
        if self._engine.halted:
            tell(text)
        else:
            self._engine.outbox.show(partial(tell, text))

    def totals(self) -> FleetTotals:
        """Return totals of the fleet that may be a second old. They need not be durable."""
        now_s = self._shell.now_s()
        if self._totals is None or now_s >= self._totals[0] + EVERY_S:
            counts = self._core.count_states() if self._view is None else self._rows.counts
            summary = HubSummary(**self._summary(now_s))
            self._totals = now_s, FleetTotals(summary, counts)
        return self._totals[1]

    def close(self) -> None:
        """Stop; nobody who waits is answered."""
        self._waiting.clear()
        self._forget()

    def _wait(self, number: int, tell: Tell) -> None:
        self._waiting.append(_Waiting(number, tell))
        if not self.active:
            self._start()

    def _start(self) -> None:
        """Begin to record changes, and to make an update a second."""
        self.active = True
        self._members.changes = Changes()
        self._rows = FleetRows(self._core, self._shell.wall_s() - self._shell.now_s())
        self._tick(self._run)

    # -- once a second ---------------------------------------------------------------------------------------

    def _tick(self, run: int) -> None:
        """Begin an update if somebody waits for it. Stop if nobody has waited for a while."""
        if run != self._run:
            return
        self._idle_s = 0.0 if self._waiting else self._idle_s + EVERY_S
        if self._idle_s > IDLE_S:
            self._forget()
            return
        if abs(self._shell.wall_s() - self._shell.now_s() - self._rows.zero_s) > CLOCK_S:
            self._forget()
            self._start()
            return
        if self._waiting and self._engine.halted:
            self._publish_halted()
        elif self._waiting and not self._drafting:
            self._drafting = True
            self._draft()
        self._shell.after(EVERY_S, partial(self._tick, run))

    def _draft(self) -> None:
        """Describe the changed devices in slices, and then the fleet."""
        changes = self._members.changes
        assert changes is not None
        for name in self._rows.begin(self._shell.now_s()):
            changes.note(name, urgent=True)
        if self._unknown:
            self._unknown = False
            changes.take(len(changes))
            names = [*dict.fromkeys([*self._members.members, *self._rows.rows])]
        else:
            names = changes.take(CHANGES_MAX)
        self._describe(self._run, names, [])

    def _describe(self, run: int, names: list[str], described: list[Described]) -> None:
        """Describe the next slice, which begins after those that are already described."""
        if run != self._run:
            return
        begin = len(described)
        described += self._rows.describe(names[begin : begin + SLICE], self._shell.now_s())
        is_last = len(described) == len(names)
        then = partial(self._finish, run, described) if is_last else partial(self._describe, run, names, described)
        self._shell.after(0.0, then)

    def _finish(self, run: int, described: list[Described]) -> None:
        """Describe the fleet, and publish the update once it is durable."""
        if run != self._run:
            return
        now_s = self._shell.now_s()
        summary = self._summary(now_s)
        attention = self._rows.attention(now_s)
        refused, unseen = self._absent(summary)
        attention += absent_devices(refused, unseen[:ATTENTION_MAX])
        view = _View(
            time=round(self._rows.zero_s + now_s, 3),
            summary=_shortened(summary),
            attention=attention[:ATTENTION_MAX],
            attention_count=self._rows.attention_count + len(refused) + len(unseen),
            pending=self._shell.pending_keys(),
            point=self._curve.last,
        )

        def publish() -> None:
            if run == self._run:
                self._drafting = False
                self._publish(described, view)

        # A step of its own, because the first update of a large fleet takes milliseconds to encode.
        self._engine.outbox.show(partial(self._shell.after, 0.0, publish))

    def _summary(self, now_s: float) -> dict[str, Any]:
        """Return the fields of a `HubSummary`."""
        sample = self._members.sample(self._core.version)
        return self._core.describe(sample, now_s) | self._shell.describe()

    def _absent(self, summary: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
        """Return the refused devices, and the others that never came."""
        refused: dict[str, str] = summary["refused"]
        return refused, [name for name in summary["enrolled_unseen"] if name not in refused]

    # -- updates ---------------------------------------------------------------------------------------------

    def _publish_halted(self) -> None:
        """Publish events and the reason while the log cannot be written.

        The first update contains the newest durable status.
        """
        now_s, time = self._shell.now_s(), round(self._shell.wall_s(), 3)
        if self._view is not None:
            summary = self._view.summary | self._shell.describe()
            self._publish([], self._view._replace(time=time, summary=_shortened(summary)))
            return
        status = msgspec.json.decode(self._engine.status_answers.shown, type=dict[str, Any])
        described = self._rows.look(msgspec.convert(status.pop("devices"), list[DeviceStatus]), now_s)
        self._unknown = True
        summary, pending = _shortened(status | self._shell.describe()), self._shell.pending_keys()
        attention = self._rows.attention(now_s)
        self._publish(described, _View(time, summary, attention, self._rows.attention_count, pending, 0))

    def _publish(self, described: list[Described], view: _View) -> None:
        """Apply what was described, and send the update to those that wait."""
        rows, gone = self._rows.apply(described)
        is_first, self._view, self._whole = self._view is None, view, b""
        self.number += 1
        if not is_first:
            changes = {
                "previous": self.number - 1,
                "columns": [],
                "devices": raw_list(rows),
                "gone": gone,
                "events": self._events.latest(EVENTS_SHOWN, self._event, self._events.last),
                "history": self._curve.since(self._point, view.point),
            }
            self._kept.append(self._encode(view, changes))
        self._event, self._point = self._events.last, view.point
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.tell(self._since(one.after, view))

    def _since(self, number: int, view: _View) -> bytes:
        """Return what a viewer needs that has received the update with this number."""
        late = self.number - number
        if not 0 < late <= len(self._kept):
            return self._encode_whole(view)
        return self._kept[-1] if late == 1 else b"\n".join(list(self._kept)[-late:])

    def _encode_whole(self, view: _View) -> bytes:
        """Return the newest update as a whole one, which is encoded once."""
        if not self._whole:
            everything = {
                "previous": 0,
                "columns": COLUMNS,
                "devices": raw_list(self._rows.rows.values()),
                "gone": [],
                "events": self._events.latest(EVENTS_SHOWN, 0, self._event),
                "history": self._curve.since(0, self._point),
            }
            self._whole = self._encode(view, everything)
        return self._whole

    def _encode(self, view: _View, changes: dict[str, Any]) -> bytes:
        """Encode a `FeedUpdate`."""
        summary = msgspec.convert(view.summary, HubSummary)
        return msgspec.json.encode(
            {
                "lineage": self._core.lineage,
                "number": self.number,
                "time": view.time,
                "summary": view.summary,
                "notices": [*find_notices(summary)],
                "denied": denied_words(summary.denied),
                "counts": self._rows.counts,
                "attention": view.attention,
                "attention_count": view.attention_count,
                **changes,
                "pending": view.pending,
            }
        )


def _shortened(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary with at most `LISTED_MAX` entries in its long lists."""
    return {**summary, **{key: summary[key][:LISTED_MAX] for key in ("alarms", "enrolled_unseen")}}


class _Devices(msgspec.Struct):
    """The devices of an encoded status."""

    devices: list[DeviceStatus]
