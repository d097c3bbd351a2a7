"""`DeviceCore`: the device as a deterministic state machine, without I/O or clock.

It consists of two small state machines. The *link*, in this file, is `offline`, `handshake` or
`joined`. It decides when to connect and to which hub, when to ping, and when to consider the hub
lost. The *work* is in `work_cycle.py`. They interact only when the hub connects or disconnects:
`WorkCycle.welcomed` repeats unanswered messages, and `WorkCycle.cut_off` continues without the hub.
"""

import math
from random import Random
from typing import Literal

from edgeasync.core.device import effects, events
from edgeasync.core.device.bounds import clamp_retry, clamp_times
from edgeasync.core.device.data_quota import SPARE_BYTES, DataQuota
from edgeasync.core.device.effects import DeviceEffect
from edgeasync.core.device.handshake import DeviceHandshake, Greeting, refuse_welcome
from edgeasync.core.device.hub_rotation import HubRotation
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import Throttle, ThrottleReadings, ThrottleSection
from edgeasync.core.device.unexpected import UnexpectedEvents
from edgeasync.core.device.work_cycle import WorkCycle
from edgeasync.errors import AccessError, ModelMismatchError, RefusedError
from edgeasync.protocol.messages import (
    CLOCK_S_MAX,
    Ack,
    Assignment,
    Goodbye,
    GraphHeader,
    Hello,
    Message,
    Ping,
    Pong,
    Refuse,
    Welcome,
)
from edgeasync.states import Table, check_move

ROUND_TRIP_MAX_S = 3600.0
"""Longer round trips are ignored as invalid."""

LinkState = Literal["offline", "handshake", "joined", "over"]

LINK: Table[LinkState] = {
    "offline": ("handshake", "over"),
    "handshake": ("joined", "offline", "over"),
    "joined": ("offline", "over"),
    "over": (),
}
"""The states of the link to the hub.

In the state `handshake`, the device waits for a `Welcome`. The state `over` is final.
"""

CLOCK_EVERY_S = 60.0
"""A ping contains the device's wall clock if the device has just joined, or if the last such ping
is this old. All other pings are shorter.
"""


class DeviceCore:
    """A device's decisions. Methods return effects to execute in order.

    - `hello` describes the device. The core adds the device's limits, its session, the number of
      its last answered update, and its remaining quota.
    - `limits` are the device's own; `throttle` slows it down and pauses it.
    - `hubs` is the number of hub addresses, which are tried in turn.
    - `random` adds jitter to the times of retries and heartbeats.
    - With `trains_at_rest`, the device also trains while the hub asks it to idle.
      `limits.alone_steps_max` limits these steps.

    `link` is changed only by `_move_link`, as the table `LINK` allows. `unexpected` counts events
    that were ignored because they did not fit the state, by a short text such as "Welcome while
    joined".
    """

    def __init__(
        self,
        hello: Hello,
        limits: DeviceLimits,
        random: Random,
        *,
        hubs: int = 1,
        trains_at_rest: bool = False,
        throttle: ThrottleSection | None = None,
    ) -> None:
        self.link: LinkState = "offline"
        self.limits = limits
        self.data_quota = DataQuota(limits.bytes_per_day_max)
        """The device's own daily quota. The code that sends and receives messages counts their
        bytes in it.
        """
        self.throttle = Throttle(throttle)
        self.unexpected = UnexpectedEvents()
        self.work = WorkCycle(limits, self.data_quota, random, self.unexpected, trains_at_rest=trains_at_rest)
        self.welcome: Welcome | None = None
        self.handshake = DeviceHandshake(0.0)
        self.round_trip_s: float | None = None
        self._greeting = Greeting(hello, limits)
        self._random = random
        self._rotation = HubRotation(hubs, random)
        self._paused = False
        self._connect_at_s = self._ping_at_s = self._clock_at_s = self._heard_s = 0.0

    @property
    def random_seed(self) -> int:
        """The seed of a codec's random numbers, which is fixed for an incarnation of a state id."""
        return int.from_bytes(self._greeting.own.state_id) + self._greeting.own.incarnation

    @property
    def hub(self) -> int:
        """The position in the list of the current hub or, while offline, of the hub to try next."""
        return self._rotation.hub

    def check(self) -> None:
        """Raise `AssertionError` if the state is inconsistent; cheap for every event."""
        assert self.link != "joined" or self.welcome is not None, "joined without a welcome"
        assert self.link == "over" or self.work.connected == (self.link == "joined"), "link and work disagree"
        self.work.check()

    def _move_link(self, link: LinkState) -> None:
        """Change the link's state; raises `TransitionError` if `LINK` does not allow it."""
        check_move(LINK, self.link, link, "a device's link")
        self.link = link

    # -- time ------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is next due; `None` once the device has finished."""
        if self.link == "over":
            return None
        if self.link == "offline":
            return self._connect_at_s
        if self.link == "handshake" or self.welcome is None:
            return self.handshake.ends_s
        return min(self._ping_at_s, self._heard_s + self.welcome.lease_s, self.work.next_deadline_s())

    def begin(self, now_s: float) -> list[DeviceEffect]:
        """Connect for the first time."""
        self._heard_s = now_s  # silence counts from here
        self.data_quota.begin(now_s)
        return self._begin_handshake(now_s)

    def tick(self, now_s: float, steps_total: int, clock_s: float = math.nan) -> list[DeviceEffect]:
        """Process what is due: reconnect, ping, or repeat an unanswered message.

        `clock_s` is the device's wall clock, in seconds since 1970.
        """
        if self.link == "over":
            return []
        if self.link == "offline":
            return self._begin_handshake(now_s) if now_s >= self._connect_at_s else []
        if self.link == "handshake" or self.welcome is None:
            if now_s < self.handshake.ends_s:
                return []
            return self._give_up_handshake(now_s, "no hub answers yet; retrying until one does")
        if now_s >= self._heard_s + self.welcome.lease_s:
            return self._go_offline(now_s, f"the hub was silent for {now_s - self._heard_s:.0f} s")
        if self.data_quota.is_spent(now_s):
            return self._rest_until_tomorrow(now_s)
        decided: list[DeviceEffect] = []
        if now_s >= self._ping_at_s:
            self._ping_at_s = now_s + self.welcome.heartbeat_s
            decided.append(effects.SendToHub(self._ping(self.welcome, now_s, steps_total, clock_s)))
        return self._conclude(decided + self.work.tick(now_s), now_s)

    def _ping(self, welcome: Welcome, now_s: float, steps_total: int, clock_s: float) -> Ping:
        pace, tells_clock = self.throttle.pace, now_s >= self._clock_at_s and 0.0 <= clock_s <= CLOCK_S_MAX
        if tells_clock:
            self._clock_at_s = now_s + CLOCK_EVERY_S
        return Ping(
            session=welcome.session,
            sent_s=now_s,
            steps_total=steps_total,
            round_trip_s=self.round_trip_s or 0.0,
            pace_percent=math.ceil(100.0 * pace.share),
            pace_reason=pace.reason,
            temperature_c=self.throttle.temperature_c,
            clock_s=round(clock_s, 3) if tells_clock else None,
        )

    # -- events ----------------------------------------------------------------------------------------------

    def handle(self, event: events.DeviceEvent, now_s: float) -> list[DeviceEffect]:
        """Process one event; return the effects to execute in order."""
        if self.link == "over":
            return self.unexpected.ignore(f"{type(event).__name__} after the end", normal=True)
        match event:
            case events.DeviceReceived():
                self.handshake.answered, self._heard_s = True, now_s
                decided = self._received(event.message, now_s)
            case events.DeviceReceivedMalformed():
                decided = self._malformed(event.reason)
            case events.TransferMoved():
                self._heard_s = now_s
                decided = self.work.transfer_moved(now_s)
            case events.Connected():
                decided = self._connected(now_s)
            case events.Disconnected():
                decided = self._disconnected(now_s)
            case events.DaySpent():
                decided = self._rest_until_tomorrow(now_s)
            case events.Sensed():
                decided = self._sensed(event.readings, now_s)
            case events.PauseRequested() | events.ResumeRequested() | events.DeviceStopRequested():
                decided = self._asked(event, now_s)
            case _:
                decided = self.work.handle(event, now_s)
        return self._conclude(decided, now_s)

    def _received(self, message: Message, now_s: float) -> list[DeviceEffect]:
        match message:
            case Welcome():
                return self._welcomed(message, now_s)
            case Refuse():
                return self._refused(message, now_s)
            case Goodbye() if self.link == "joined":
                if message.reason == "finished":
                    return [effects.EndAgent(effects.FINISHED)]
                return self._go_offline(now_s, "the hub is stopping")
            case Pong() if self.link == "joined":
                self._measure(now_s - message.sent_s)
                return []
            case Ack() if self.link == "joined":
                return self.work.acknowledged(message, now_s)
            case Assignment() if self.link == "joined":
                return self.work.assigned(message, now_s)
            case GraphHeader() if self.link == "joined":
                return self.work.graph_offered(message, now_s)
        return self.unexpected.ignore(f"{type(message).__name__} while {self.link}")

    def _malformed(self, reason: str) -> list[DeviceEffect]:
        if self.link == "joined":
            return [effects.DeviceReport("warning", f"the hub sent an invalid message: {reason}")]
        self.handshake.unreadable = reason  # perhaps not a hub; `_give_up_handshake` reports it
        return []

    def _measure(self, round_trip_s: float) -> None:
        if 0.0 <= round_trip_s <= ROUND_TRIP_MAX_S:  # a hub may return any value
            self.round_trip_s = round_trip_s

    def _asked(
        self, event: events.PauseRequested | events.ResumeRequested | events.DeviceStopRequested, now_s: float
    ) -> list[DeviceEffect]:
        """Process a request from the user of the device."""
        match event:
            case events.PauseRequested():
                return self._pause(event, now_s)
            case events.ResumeRequested() if self._paused:
                self._paused = False
                self.work.overlap.pause = None
                self._heard_s = now_s  # do not count the pause as silence of the hub
                return self._begin_handshake(now_s)
            case events.DeviceStopRequested():
                return [*self._goodbye(), effects.EndAgent("stopped")]
        return self.unexpected.ignore("ResumeRequested without a pause", normal=True)

    def _sensed(self, readings: ThrottleReadings, now_s: float) -> list[DeviceEffect]:
        """Apply the pace that the sensor readings allow.

        Report a change to the hub and the user.
        """
        if not self.throttle.observe(readings, now_s):
            return []
        pace = self.throttle.pace
        if self.link == "joined":
            self._ping_at_s = now_s
        if not pace.share:
            told = effects.DeviceReport("paused", pace.reason)
        elif pace.reason:
            told = effects.DeviceReport("slowed", f"training {pace.share:.0%} of the time: {pace.reason}")
        else:
            told = effects.DeviceReport("full_pace")
        return [effects.SetPace(pace), told]

    def _goodbye(self, reason: Literal["stopping", "paused"] = "stopping") -> list[DeviceEffect]:
        if self.link != "joined" or self.welcome is None:
            return []
        return [effects.SendToHub(Goodbye(reason, self.welcome.session))]

    def _conclude(self, decided: list[DeviceEffect], now_s: float) -> list[DeviceEffect]:
        """End the link if an effect ends the agent; disconnect if the quota is exhausted."""
        for effect in decided:
            if isinstance(effect, effects.EndAgent):
                self._move_link("over")
                return decided
        if self.link == "joined" and self.work.cost.needs_bytes:
            decided = decided + self._rest_until_tomorrow(now_s)
        return decided

    # -- the handshake ---------------------------------------------------------------------------------------

    def _begin_handshake(self, now_s: float) -> list[DeviceEffect]:
        if not self.data_quota.bears(0, now_s):
            return self._rest_until_tomorrow(now_s)
        self._move_link("handshake")
        self.handshake = DeviceHandshake(now_s)
        hello = self._greeting.hello(self.welcome, self.work.pending.claim(), self.data_quota, now_s)
        return [effects.Connect(), effects.SendToHub(hello)]

    def _connected(self, now_s: float) -> list[DeviceEffect]:
        if self.link != "handshake":
            return self.unexpected.ignore(f"Connected while {self.link}", normal=True)
        self.handshake.connected(now_s)
        return []

    def _welcomed(self, welcome: Welcome, now_s: float) -> list[DeviceEffect]:
        """Join the hub, or end the agent if the device cannot train the hub's model."""
        if self.link != "handshake":
            return self.unexpected.ignore(f"Welcome while {self.link}")
        if (end := refuse_welcome(welcome, self.welcome, self.limits)) is not None:
            return [end]
        self._move_link("joined")
        self.welcome = welcome = clamp_times(welcome)
        self._rotation.welcomed()
        self.unexpected.welcomed()
        first_s = welcome.heartbeat_s * self._random.uniform(0.5, 1.0)
        self._clock_at_s = now_s
        self._ping_at_s = now_s + (0.0 if self.throttle.pace.share < 1.0 else first_s)
        decided: list[DeviceEffect] = [effects.DeviceReport("joined", f"as {self._greeting.own.device_id}")]
        if warning := self.data_quota.warning(welcome.heartbeat_s):
            decided.append(effects.DeviceReport("warning", warning))
        return decided + self.work.welcomed(welcome, now_s)

    def _give_up_handshake(self, now_s: float, cause: str) -> list[DeviceEffect]:
        """Go offline after a failed handshake.

        If no hub answers, report this at most once a minute.
        """
        decided = self._go_offline(now_s, cause)
        if not self.handshake.answered and self._rotation.is_report_due(now_s):
            decided.append(effects.DeviceReport("unreachable", self.handshake.unreadable, since_s=self._heard_s))
        return decided

    # -- loss of the hub -------------------------------------------------------------------------------------

    def _disconnected(self, now_s: float) -> list[DeviceEffect]:
        if self.link == "handshake":
            return self._give_up_handshake(now_s, "the connection was lost")
        if self.link == "offline":
            return self.unexpected.ignore("Disconnected while offline", normal=True)
        return self._go_offline(now_s, "the connection was lost")

    def _go_offline(
        self, now_s: float, cause: str, retry_after_s: float | None = None, *, stay: bool = False
    ) -> list[DeviceEffect]:
        """Disconnect, and retry later.

        After a failed handshake, the next hub is tried, unless `stay` is set.
        """
        decided: list[DeviceEffect] = [effects.CloseConnection()]
        if self.link == "joined":
            decided.append(effects.DeviceReport("disconnected", cause))
        elif self._rotation.is_news:
            decided.append(effects.DeviceReport("waiting", cause))
        move_on = self.link == "handshake" and not stay
        self._connect_at_s = self._rotation.fail(now_s, retry_after_s, move_on=move_on)
        self._move_link("offline")
        return decided + self.work.cut_off()

    def _rest_until_tomorrow(self, now_s: float) -> list[DeviceEffect]:
        """Disconnect until the device's day ends, because the remaining quota is too low."""
        left_bytes, ends_s = self.data_quota.left_bytes(now_s), self.data_quota.ends_s(now_s)
        needed_bytes = self.work.cost.needs_bytes or SPARE_BYTES
        told = (
            f"{left_bytes} of the daily quota of {self.data_quota.bytes_per_day_max} bytes are left, but "
            f"{needed_bytes} are needed; waiting {ends_s - now_s:.0f} s until the day ends"
        )
        if needed_bytes > (self.data_quota.bytes_per_day_max or 0):
            told += ". The quota is too small for an exchange; raise [limits] bytes_per_day_max"
        decided = self._leave_until(ends_s)
        self._heard_s = ends_s  # do not count the wait as silence of the hub
        return [*decided, effects.DeviceReport("resting", told), *self.work.cut_off()]

    def _pause(self, pause: events.PauseRequested, now_s: float) -> list[DeviceEffect]:
        """Disconnect until the user resumes the device."""
        self._paused = True
        decided = self._leave_until(math.inf, "paused")
        self._heard_s = now_s
        return decided + self.work.pause(training=pause.training)

    def _leave_until(
        self, until_s: float, reason: Literal["stopping", "paused"] = "stopping"
    ) -> list[DeviceEffect]:
        """Send `Goodbye` if joined, and reconnect at the time `until_s`."""
        decided = self._goodbye(reason)
        if self.link != "offline":
            decided.append(effects.CloseConnection(goodbye=True))
            self._move_link("offline")
        self._connect_at_s = until_s
        return decided

    def _refused(self, refuse: Refuse, now_s: float) -> list[DeviceEffect]:
        """Retry later after a temporary refusal; end the agent after a permanent one."""
        retry_after_s = clamp_retry(refuse.retry_after_s)
        match refuse.code:
            case "busy":
                return self.work.hub_is_busy(retry_after_s, now_s, rest=refuse.sentence if refuse.rest else None)
            case "unknown_session" | "sequence":
                if self.link != "joined":
                    return self.unexpected.ignore(f"Refuse of a session while {self.link}")
                # Open a new connection: more such refusals may be in flight on this one, and each
                # would end a new session.
                return self._go_offline(now_s, refuse.sentence)
            case "malformed":
                self.work.back_off(now_s)
                return [
                    effects.DeviceReport("warning", f"the hub rejected a message as malformed: {refuse.sentence}")
                ]
            case "duplicate_device_id" if self._rotation.takes_duplicate_refusal():
                return [
                    effects.DeviceReport("warning", refuse.sentence),
                    *self._go_offline(now_s, refuse.sentence, retry_after_s or 0.0, stay=True),
                ]
            case "hub_full" | "quarantined" if retry_after_s is not None:
                stay = refuse.code == "quarantined"
                again = f"{refuse.sentence}; retrying in {retry_after_s:.0f} s"
                return [
                    effects.DeviceReport("warning", refuse.sentence),
                    *([effects.DeviceReport("quarantined", again)] if stay else []),
                    *self._go_offline(now_s, refuse.sentence, retry_after_s, stay=stay),
                ]
            case "not_allowed":  # only after both ends have proved their keys
                return [effects.EndAgent("keys do not match", AccessError(refuse.sentence))]
            case "model_mismatch":
                return [effects.EndAgent("model mismatch", ModelMismatchError(refuse.sentence))]
        return [effects.EndAgent(refuse.code, RefusedError(refuse.sentence))]
