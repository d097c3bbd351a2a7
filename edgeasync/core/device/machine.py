"""`DeviceCore`: the device as a deterministic state machine. Events in, effects out; no I/O, no clock.

Two small machines side by side. The *link* is `offline`, `greeting` or `joined`; the *work* is `idle` (it
wants an assignment), `equipping` (it needs the hub's training graph first), `adopting` (an assignment's payload
is coming in), `training`, or `pushing` (an update has no answer yet). They meet only when the link becomes
`joined`: work then says again what was not answered. So training goes on while the hub is away, and an update
is repeated, under the same number, until it is answered.
"""

from random import Random
from typing import Literal

from edgeasync.core.device.effects import (
    Connect,
    DeviceEffect,
    Disconnect,
    FindGraph,
    InstallModel,
    Join,
    PutAside,
    Report,
    ResolvePush,
    Send,
    SendPush,
    Stop,
    TakeGraph,
    Train,
)
from edgeasync.core.device.events import (
    DeviceEvent,
    Disconnected,
    GraphBroken,
    GraphEvent,
    GraphForged,
    GraphHeld,
    GraphMissing,
    InstallFailed,
    Kept,
    Malformed,
    ModelInstalled,
    OverlapTrained,
    Received,
    StopRequested,
    Trained,
    TransferMoved,
)
from edgeasync.core.device.hub_rotation import BACKOFF_MAX_S, BACKOFF_MIN_S, HubRotation
from edgeasync.core.device.overlap import OverlapSteps
from edgeasync.core.device.pending_push import ModelKey, PendingPush, describe
from edgeasync.errors import EdgeAsyncError, GraphError, ModelMismatchError, RefusedError
from edgeasync.protocol.messages import (
    PROTOCOL_VERSIONS,
    Ack,
    Assignment,
    DeviceProfile,
    Fetch,
    FetchGraph,
    Graph,
    Hello,
    Leave,
    Message,
    ModelVersion,
    Outcome,
    Ping,
    Pong,
    Push,
    Quarantine,
    Refuse,
    Rejected,
    Welcome,
)
from edgeasync.states import State, Table

GREETING_S = 3.0
"""How long a new connection may take to be welcomed."""

UNREACHABLE_EVERY_S = 60.0
"""How often a device says, at most, that it reaches no hub."""

ROUND_TRIP_MAX_S = 3600.0
"""A pong that took longer is not believed."""

DUPLICATE_REFUSALS_MAX = 3
"""Refusals as a duplicate device, each after the lease it names, before the device gives up."""

LOSS_OPTIONAL_VERSION = 2
"""The first version of the protocol in which an update need not have a loss."""

_NEEDS_A_LOSS = (
    "the hub speaks protocol version 1, in which every update has a loss, and this trainer tells none: "
    "install a newer edgeasync on the hub, or let the trainer's step return a loss"
)

GRAPH_BYTES_MAX = 64 << 20
"""A device takes no larger graph unless it is told otherwise."""


Link = Literal["offline", "greeting", "joined", "over"]
Work = Literal["idle", "equipping", "adopting", "training", "pushing"]

LINK: Table[Link] = {
    "offline": ("greeting", "over"),
    "greeting": ("joined", "offline", "over"),
    "joined": ("offline", "over"),
    "over": (),
}
"""The link to the hub: `greeting` waits for a welcome; `over` is the end."""

WORK: Table[Work] = {
    "idle": ("equipping", "adopting", "pushing"),
    "equipping": ("idle",),
    "adopting": ("training", "idle"),
    "training": ("pushing",),
    "pushing": ("idle", "equipping"),
}
"""The work: `idle` waits for an assignment, `equipping` for the training graph, `pushing` for an answer."""


class DeviceCore:
    """A device's decisions. `begin`, `handle` and `tick` return effects to carry out in order."""

    link = State(LINK)
    work = State(WORK)

    def __init__(
        self,
        *,
        device_id: str,
        state_id: bytes,
        start: int,
        profile: DeviceProfile,
        codecs: tuple[str, ...],
        fingerprint: str | None,
        graph_bytes_max: int,
        random: Random,
        hubs: int = 1,
        alone_steps_max: int = 0,
    ) -> None:
        self.device_id = device_id
        self.welcome: Welcome | None = None
        self.held: ModelVersion | None = None
        self.push_codec = "identity"
        self.round_trip_s: float | None = None
        self.updates_answered = 0
        self.answered = False
        """Whether a hub has said anything on this connection, or on the last one if there is none."""
        self._state_id = state_id
        self._start = start
        self._profile = profile
        self._codecs = codecs
        self._fingerprint = fingerprint
        self._graph_bytes_max = graph_bytes_max
        self._random = random
        self._turns = HubRotation(hubs, random)
        self._ahead = OverlapSteps(alone_steps_max)
        self._equipped = False
        self._joined: dict[str, object] | None = None
        self._unanswered = PendingPush()
        self._adopting: Assignment | None = None
        self._duplicate_refusals = 0
        self._diverged = self._busy = self._in_quarantine = False
        self._unreadable = ""
        """Why what this connection's greeting was answered by could not be read."""
        self._link_at_s = self._work_at_s = self._ping_at_s = self._heard_s = self._tell_at_s = 0.0

    @property
    def random_seed(self) -> int:
        """What to draw a codec's randomness from: the same for the same start of the same state."""
        return int.from_bytes(self._state_id) + self._start

    @property
    def hub(self) -> int:
        """Which hub of the list is spoken to, or tried next."""
        return self._turns.hub

    @property
    def goes_on(self) -> bool:
        """Whether training may go on from an update before the next model is here."""
        assert self.welcome is not None
        return max(self.welcome.overlap_steps_max, self._ahead.alone_steps_max) > 0

    def recall(self, push: Push, model: ModelKey) -> None:
        """Before `begin`: go on with an update of this model that was made before this start."""
        self._unanswered.recall(push, model)
        self.work = "pushing"

    def check(self) -> None:
        """Raise `AssertionError` where the state contradicts itself; cheap enough for after every event."""
        pending = self._unanswered
        assert self.link != "joined" or self.welcome is not None, "joined without a welcome"
        assert self.work != "adopting" or self._adopting is not None, "adopting nothing"
        equipped = self._equipped or self.welcome is None or self.welcome.graph is None
        assert self.work in ("equipping", "pushing", "idle") or equipped, "at work without the graph"
        assert self.work != "adopting" or self.link in ("joined", "over"), "adopting without a hub"
        assert self.work != "pushing" or pending.push is not None, "pushing nothing"
        assert self.work != "training" or self.held is not None, "training from no version"
        assert pending.push is None or pending.push.seq == pending.seq_last + 1, "a push that is not the next"

    # -- time ------------------------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is next due; `None` once the device has finished."""
        if self.link == "over":
            return None
        if self.link != "joined" or self.welcome is None:
            return self._link_at_s
        due = [self._ping_at_s, self._heard_s + self.welcome.lease_s]
        if self.work != "training":
            due.append(self._work_at_s)
        return min(due)

    def begin(self, now_s: float) -> list[DeviceEffect]:
        """Connect for the first time."""
        self._heard_s = now_s  # so that silence is counted from here
        return self._greet(now_s)

    def tick(self, now_s: float, steps_total: int) -> list[DeviceEffect]:
        """Do what is due: connect again, ping, or repeat what was not answered."""
        if self.link == "over":
            return []
        if self.link == "offline":
            return self._greet(now_s) if now_s >= self._link_at_s else []
        if self.link == "greeting" or self.welcome is None:
            return (
                self._give_up_greeting(now_s, "no hub answers yet; trying until one does")
                if now_s >= self._link_at_s
                else []
            )
        if now_s >= self._heard_s + self.welcome.lease_s:
            return self._go_offline(now_s, f"the hub was silent for {now_s - self._heard_s:.0f} s")
        effects: list[DeviceEffect] = []
        if now_s >= self._ping_at_s:
            self._ping_at_s = now_s + self.welcome.heartbeat_s
            effects.append(Send(Ping(self.welcome.session, now_s, steps_total, self.round_trip_s or 0.0)))
        if self.work != "training" and now_s >= self._work_at_s:
            effects += self._speak(now_s)
        return effects

    # -- events ----------------------------------------------------------------------------------------------

    def handle(self, event: DeviceEvent, now_s: float) -> list[DeviceEffect]:
        """Take in one event; return the effects to carry out in order."""
        if self.link == "over":
            return []
        match event:
            case Received() | Malformed():
                return self._received(event, now_s)
            case Trained() | OverlapTrained():
                return self._trained(event, now_s)
            case ModelInstalled():
                return self._adopted(event.assignment)
            case InstallFailed():
                return self._adoption_failed(event, now_s)
            case GraphHeld() | GraphMissing() | GraphBroken() | GraphForged():
                return self._graph_known(event, now_s) if self.work == "equipping" else []
            case Kept() | TransferMoved():
                return self._moved(event, now_s)
            case Disconnected():
                return self._disconnected(now_s)
            case StopRequested():
                return self._stop_requested()

    def _received(self, event: Received | Malformed, now_s: float) -> list[DeviceEffect]:
        if isinstance(event, Received):
            self.answered, self._heard_s = True, now_s
            return self._arrived(event.message, now_s)
        if self.link == "joined":
            return [Report("warning", f"from the hub: {event.reason}")]
        self._unreadable = event.reason  # it may be no hub, which is told of once a minute
        return []

    def _arrived(self, message: Message, now_s: float) -> list[DeviceEffect]:
        match message:
            case Welcome():
                return self._welcomed(message, now_s)
            case Refuse():
                return self._refused(message, now_s)
            case Leave():
                if message.reason == "finished":
                    return self._finish("the hub has finished training")
                return self._go_offline(now_s, "the hub is stopping")
            case Pong():
                self._measure(now_s - message.sent_s)
            case Ack() | Assignment() if self.work == "equipping":
                return []  # an update from the spool is said again once the graph is here
            case Ack() if self.link == "joined":
                return self._acknowledged(message, now_s)
            case Assignment() if self.link == "joined":
                return self._assigned(message, now_s)
            case Graph() if self.link == "joined" and self.work == "equipping":
                return self._graph_offered(message, now_s)
        return []

    def _moved(self, event: Kept | TransferMoved, now_s: float) -> list[DeviceEffect]:
        if isinstance(event, Kept):
            push = self._unanswered.push
            due = push is not None and push.seq == event.seq and self.work == "pushing"
            return self._speak(now_s) if due and self.link == "joined" else []
        self._heard_s = now_s
        self._wait(now_s)
        return []

    def _assigned(self, message: Assignment, now_s: float) -> list[DeviceEffect]:
        effects = self._acknowledged(message.ack, now_s) if message.ack is not None else []
        if self.work not in ("idle", "adopting"):
            return effects
        self.push_codec = message.push_codec or self.push_codec
        if message.deltas is not None and self.held is None:
            self.work, self._work_at_s = "idle", now_s + BACKOFF_MIN_S
            return effects  # it leads on from what was lost with the power: the whole is fetched
        self.work = "adopting"
        self._adopting = message
        self._wait(now_s)
        return [*effects, InstallModel(message)]

    def _measure(self, round_trip_s: float) -> None:
        if 0.0 <= round_trip_s <= ROUND_TRIP_MAX_S:  # a hub may send back anything
            self.round_trip_s = round_trip_s

    # -- link ------------------------------------------------------------------------------------------------

    def _greet(self, now_s: float) -> list[DeviceEffect]:
        self.link = "greeting"
        self._link_at_s = now_s + GREETING_S
        self.answered, self._unreadable = False, ""
        return [Connect(), Send(self._hello())]

    def _hello(self) -> Hello:
        return Hello(
            protocol_versions=PROTOCOL_VERSIONS,
            device_id=self.device_id,
            state_id=self._state_id,
            start=self._start,
            session=None if self.welcome is None else self.welcome.session,
            seq_answered=self._unanswered.claim(),
            profile=self._profile,
            codecs=self._codecs,
            fingerprint=self._fingerprint,
        )

    def _disconnected(self, now_s: float) -> list[DeviceEffect]:
        if self.link == "greeting":
            return self._give_up_greeting(now_s, "the connection broke")
        return [] if self.link == "offline" else self._go_offline(now_s, "the connection broke")

    def _stop_requested(self) -> list[DeviceEffect]:
        goodbye: list[DeviceEffect] = []
        if self.link == "joined" and self.welcome is not None:
            goodbye.append(Send(Leave("stopping", self.welcome.session)))
        return [*goodbye, *self._finish("stopped")]

    def _give_up_greeting(self, now_s: float, cause: str) -> list[DeviceEffect]:
        """Go offline from a greeting without a welcome; of silence tell, but once a minute only."""
        effects = self._go_offline(now_s, cause)
        if not self.answered and now_s >= self._tell_at_s and self._turns.all_failed:
            self._tell_at_s = now_s + UNREACHABLE_EVERY_S
            effects.append(Report("unreachable", self._unreadable, since_s=self._heard_s))
        return effects

    def _go_offline(
        self, now_s: float, cause: str, retry_after_s: float | None = None, *, stay: bool = False
    ) -> list[DeviceEffect]:
        effects: list[DeviceEffect] = [Disconnect()]
        if self.link == "joined":
            effects.append(Report("disconnected", cause))
        elif self._turns.is_news:
            effects.append(Report("waiting", cause))
        self._link_at_s = self._turns.fail(now_s, retry_after_s, move_on=self.link == "greeting" and not stay)
        self.link = "offline"
        if self.work == "adopting":
            self.work = "idle"
        return effects + self._train_on()

    def _welcomed(self, welcome: Welcome, now_s: float) -> list[DeviceEffect]:
        if self.link != "greeting":
            return []
        if welcome.protocol_version not in PROTOCOL_VERSIONS:
            return self._finish(
                "protocol_version",
                RefusedError(
                    f"the hub chose protocol version {welcome.protocol_version}, which this device does not know; "
                    "install the same edgeasync on both"
                ),
            )
        before = self.welcome
        if before is not None and (before.spec, before.graph) != (welcome.spec, welcome.graph):
            return self._finish(
                "model mismatch",
                ModelMismatchError("the hub now trains another model than before; start the agent again"),
            )
        if welcome.graph is not None and not 0 < welcome.graph_bytes <= self._graph_bytes_max:
            return self._refuse_graph(
                f"the hub's graph has {welcome.graph_bytes} bytes, over this device's {self._graph_bytes_max}; "
                "raise [agent] graph_bytes_max if you trust the hub"
            )
        self.link = "joined"
        self.welcome = welcome
        self.push_codec = welcome.push_codec
        self._duplicate_refusals = 0
        self._turns.welcomed()
        self._tell_at_s = 0.0
        self._ping_at_s = now_s + welcome.heartbeat_s * self._random.uniform(0.5, 1.0)
        effects: list[DeviceEffect] = [Report("joined", f"as {self.device_id}")]
        if self._unanswered.drop_foreign(welcome):
            effects.append(PutAside("an update of another model than this hub's"))
        if dropped := self._unanswered.agree(welcome.seq_last, welcome.checksum_last):
            effects.append(Report("warning", dropped))
        if self.work == "pushing" and self._unanswered.push is None:
            self.work = "idle"
        if welcome.graph is None or self._equipped:
            return effects + self._join(now_s)
        self.work = "equipping"
        self._wait(now_s)
        return [*effects, FindGraph(welcome.graph)]

    def _join(self, now_s: float) -> list[DeviceEffect]:
        """Make ready for what the hub describes, unless that was done, then let the work speak."""
        assert self.welcome is not None
        effects: list[DeviceEffect] = []
        if self._joined != self.welcome.settings:
            self._joined = self.welcome.settings
            effects.append(Join(self.welcome))
        if self.work in ("equipping", "adopting"):
            self.work = "idle"
        if self.work != "training":
            effects += self._speak(now_s)
        return effects

    def _refused(self, refuse: Refuse, now_s: float) -> list[DeviceEffect]:
        match refuse.code:
            case "busy":
                self._work_at_s = now_s + (refuse.retry_after_s or 1.0) * self._random.uniform(1.0, 1.5)
                self._busy = True
                return self._train_on()
            case "unknown_session" | "sequence":
                # On this connection more of them may be on their way, and would void each session there is next.
                return self._go_offline(now_s, refuse.sentence) if self.link == "joined" else []
            case "malformed":
                self._work_at_s = now_s + BACKOFF_MAX_S * self._random.uniform(0.5, 1.0)
                return [Report("warning", f"the hub could not read a message: {refuse.sentence}")]
            case "duplicate_device_id" if self._duplicate_refusals < DUPLICATE_REFUSALS_MAX:
                self._duplicate_refusals += 1
                return [
                    Report("warning", refuse.sentence),
                    *self._go_offline(now_s, refuse.sentence, refuse.retry_after_s or 0.0, stay=True),
                ]
            case "hub_full" | "quarantined" if refuse.retry_after_s is not None:
                stay = refuse.code == "quarantined"
                again = f"{refuse.sentence}; trying again in {refuse.retry_after_s:.0f} s"
                return [
                    Report("warning", refuse.sentence),
                    *([Report("quarantined", again)] if stay else []),
                    *self._go_offline(now_s, refuse.sentence, refuse.retry_after_s, stay=stay),
                ]
            case "model_mismatch":
                return self._finish("model mismatch", ModelMismatchError(refuse.sentence))
        return self._finish(refuse.code, RefusedError(refuse.sentence))

    def _finish(self, reason: str, error: EdgeAsyncError | None = None) -> list[DeviceEffect]:
        self.link = "over"
        return [Stop(reason, error)]

    # -- the graph -------------------------------------------------------------------------------------------

    def _graph_offered(self, graph: Graph, now_s: float) -> list[DeviceEffect]:
        assert self.welcome is not None
        if (graph.fingerprint, graph.payload_bytes) != (self.welcome.graph, self.welcome.graph_bytes):
            return self._refuse_graph("the hub sends another graph than it announced; do not trust it")
        self._wait(now_s)
        return [TakeGraph(graph)]

    def _graph_known(self, event: GraphEvent, now_s: float) -> list[DeviceEffect]:
        assert self.welcome is not None
        match event:
            case GraphHeld():
                self._equipped = True
                way = "fetched" if event.fetched else "from the cache"
                effects: list[DeviceEffect] = [Report("graph", f"{way}, {self.welcome.graph_bytes} bytes")]
                if self.link == "joined":
                    return effects + self._join(now_s)
                self.work = "idle"
                return effects
            case GraphMissing():
                return self._speak(now_s) if self.link == "joined" else []
            case GraphBroken():
                self._work_at_s = now_s + BACKOFF_MAX_S * self._random.uniform(0.5, 1.0)
                return [Report("warning", event.reason)]
            case GraphForged():
                return self._refuse_graph(
                    "the hub's graph does not have the fingerprint it was announced with; do not trust this hub"
                )

    def _refuse_graph(self, sentence: str) -> list[DeviceEffect]:
        return self._finish("graph refused", GraphError(sentence))

    # -- work ------------------------------------------------------------------------------------------------

    def _adopted(self, assignment: Assignment) -> list[DeviceEffect]:
        self.held = assignment.version
        # Of two that came in one after the other only the second is what lies in memory in the end.
        if self.work != "adopting" or assignment is not self._adopting:
            return []
        self.work = "training"
        self._ahead.adopted()
        # A hub of another make may ask for more than the device has said it allows.
        local_steps = min(assignment.local_steps, self._profile.local_steps_max or assignment.local_steps)
        return [Train(max(1, local_steps - self._ahead.steps_done))]

    def _adoption_failed(self, failed: InstallFailed, now_s: float) -> list[DeviceEffect]:
        if failed.spoilt:
            self.held = None
        if self.work == "adopting":
            self.work = "idle"
            self._work_at_s = now_s + BACKOFF_MIN_S
        return [Report("warning", failed.reason)]

    def _trained(self, result: Trained | OverlapTrained, now_s: float) -> list[DeviceEffect]:
        if isinstance(result, OverlapTrained):
            self._ahead.add(result.result)
            return self._train_on()
        if self.work != "training" or self.held is None or self.welcome is None:
            return []
        self.work = "pushing"
        ahead = self._ahead.take()
        if ahead is not None:
            result = result.after(ahead)
        push = Push(
            session=self.welcome.session,
            seq=self._unanswered.seq_last + 1,
            base=self.held,
            local_steps=result.local_steps,
            examples=result.examples,
            loss_mean=result.loss_mean,
            loss_variance=result.loss_variance,
            step_s=result.step_s,
            codec=result.codec,
            checksum=result.checksum,
            payload_bytes=result.payload_bytes,
            score=result.score,
            steps_ahead=0 if ahead is None else ahead.local_steps,
        )
        self._unanswered.make(push)
        self._busy = False
        effects = self._speak(now_s) if self.link == "joined" else []
        return effects + self._train_on()

    def _train_on(self) -> list[DeviceEffect]:
        """Train ahead while a model is waited for, further if the hub cannot be reached or takes no updates."""
        if self.work not in ("idle", "pushing") or self.welcome is None:
            return []
        alone = self._busy or self.link != "joined"
        return self._ahead.go_on(self.welcome.overlap_steps_max, alone=alone)

    def _speak(self, now_s: float) -> list[DeviceEffect]:
        """Say, or say again, what the work waits for."""
        assert self.welcome is not None
        self._wait(now_s)
        if self.work == "equipping":
            return [Send(FetchGraph(self.welcome.session))]
        if (push := self._unanswered.say(self.welcome.session)) is not None:
            if push.loss_mean is None and self.welcome.protocol_version < LOSS_OPTIONAL_VERSION:
                return self._finish("protocol_version", RefusedError(_NEEDS_A_LOSS))
            self.work = "pushing"
            return [SendPush(push)]
        self.work = "idle"
        return [Send(Fetch(self.welcome.session, self.held))]

    def _wait(self, now_s: float) -> None:
        """Give the hub a lease's time to answer before the work speaks again."""
        assert self.welcome is not None
        self._work_at_s = now_s + self.welcome.lease_s

    def _acknowledged(self, ack: Ack, now_s: float) -> list[DeviceEffect]:
        if not self._unanswered.answered(ack):
            return []
        self._busy = False
        self.work = "idle"
        self.updates_answered += 1
        self._wait(now_s)
        warned = self._warned_of(ack.outcome) + self._told_of(ack)
        return [Report("answered", describe(ack.outcome)), *warned, ResolvePush(ack.outcome)]

    def _told_of(self, ack: Ack) -> list[DeviceEffect]:
        """Tell when the hub's monitor begins to keep this device's updates out, and when that is over."""
        quarantine = ack.quarantine
        if quarantine is None and ack.outcome == Rejected("quarantined"):
            quarantine = Quarantine("the hub does not say why", 0)  # it is older than this device
        before, self._in_quarantine = self._in_quarantine, quarantine is not None
        if self._in_quarantine == before:
            return []
        if quarantine is None:
            return [Report("released", "the updates of this device count again")]
        calm = quarantine.calm_updates
        until = f"after {calm} in a row that are not alarming" if calm else "later"
        detail = f"the updates of this device do not count: {quarantine.cause}; they do again {until}"
        return [Report("quarantined", detail)]

    def _warned_of(self, outcome: Outcome) -> list[DeviceEffect]:
        """Warn of an update that was no number, once until one is taken again."""
        diverged = outcome == Rejected("not_finite")
        if diverged:
            self._ahead.drop()  # steps that went on from there are no numbers either
        begun, self._diverged = diverged and not self._diverged, diverged
        sentence = "training diverged, and the hub refused the update: scale the data, or lower the learning rate"
        return [Report("warning", sentence)] if begun else []
