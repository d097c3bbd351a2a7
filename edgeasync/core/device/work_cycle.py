"""`WorkCycle`: the device's work for its hub, as a state machine of its own.

It is `idle` (it wants an assignment), `fetching_graph` (it needs the hub's training graph first), `installing`
(an assignment's payload is arriving), `training`, or `pushing` (an update has no answer yet). The link may break
in any of these states: training continues, and an update is repeated under the same number until it is answered.
"""

import math
from random import Random
from typing import Literal

from edgeasync.core.device.answer_reports import AnswerReports, is_preempted
from edgeasync.core.device.bounds import LOCAL_STEPS_MAX
from edgeasync.core.device.data_quota import DataQuota, needed_bytes
from edgeasync.core.device.effects import (
    DeviceEffect,
    DeviceReport,
    EndAgent,
    FindGraph,
    InstallModel,
    PrepareTraining,
    PutAside,
    ResolvePush,
    ScaleLearningRate,
    SendPush,
    SendToHub,
    TakeGraph,
    Train,
    UseModel,
)
from edgeasync.core.device.events import (
    GraphBroken,
    GraphEvent,
    GraphForged,
    GraphHeld,
    GraphMissing,
    InstallFailed,
    Kept,
    ModelArrived,
    ModelInstalled,
    OverlapTrained,
    Trained,
    WorkEvent,
)
from edgeasync.core.device.hub_rotation import BACKOFF_MAX_S, BACKOFF_MIN_S
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.overlap import OverlapSteps
from edgeasync.core.device.pending_push import ModelKey, PendingPush
from edgeasync.core.device.unexpected import UnexpectedEvents
from edgeasync.errors import GraphError
from edgeasync.protocol.messages import (
    Ack,
    Assignment,
    Fetch,
    FetchGraph,
    GraphHeader,
    ModelVersion,
    Push,
    Rejected,
    Welcome,
)
from edgeasync.states import Table, check_move

RESTING_S = 10.0
"""Shorter rests are not told to people."""

WorkState = Literal["idle", "fetching_graph", "installing", "training", "pushing"]

WORK: Table[WorkState] = {
    "idle": ("fetching_graph", "installing", "pushing"),
    "fetching_graph": ("idle",),
    "installing": ("training", "idle"),
    "training": ("pushing",),
    "pushing": ("idle", "fetching_graph"),
}
"""The work: `idle` waits for an assignment, `fetching_graph` for the graph, `pushing` for an answer."""


class WorkCycle:
    """The graph, the model, training and the update. Methods return effects to carry out in order.

    `DeviceCore` calls `welcomed` when the hub can be reached and `cut_off` when it is lost, and passes on only
    messages that arrive in between. `state` moves only along its table, by `_move`.
    """

    def __init__(
        self,
        limits: DeviceLimits,
        data_quota: DataQuota,
        random: Random,
        unexpected: UnexpectedEvents,
        *,
        trains_at_rest: bool,
    ) -> None:
        self.state: WorkState = "idle"
        self.connected = False
        self.version: ModelVersion | None = None
        """The version that the device holds."""
        self._held_checksum: int | None = None
        self._recalled: tuple[ModelKey, ModelVersion, int] | None = None
        """The model that an earlier start held, until the hub has said what it trains."""
        self.push_codec = "identity"
        self.updates_answered = 0
        self.needs_bytes = 0
        """What the day's bytes do not bear, until the hub is left."""
        self.pending = PendingPush()
        self._overlap = OverlapSteps(limits.alone_steps_max)
        self._trains_at_rest = trains_at_rest
        self._answers = AnswerReports()
        self._limits = limits
        self._steps_asked = 0
        """The local steps of the newest assignment that was used in this start."""
        self._learning_rate_factor = 1.0
        self._random = random
        self._unexpected = unexpected
        self._data_quota = data_quota
        self._model_bytes: int | None = None
        self._update_bytes: int | None = None
        """The payloads of the last whole model and the last update."""
        self._welcome: Welcome | None = None
        self._prepared_for: dict[str, object] | None = None
        """The hub's settings that the shell has prepared for."""
        self._has_graph = False
        self._installing: Assignment | None = None
        self._arrived = False
        """Whether its payload is here, and waits until the steps of the delay are done."""
        self._busy = False
        """Whether the hub has asked to wait with updates, or to rest and the device trains on."""
        self._spoke_again = False
        """Whether something was sent again on this connection, so that two answers may come."""
        self._speak_at_s = 0.0
        self._pause: Literal["training", "still"] | None = None

    @property
    def may_overlap(self) -> bool:
        """Whether training may continue from an update before the next model is here."""
        assert self._welcome is not None
        welcome, own = self._welcome, self._limits.delay_steps or 0
        return max(welcome.overlap_steps_max, welcome.delay_steps, own, self._limits.alone_steps_max) > 0

    @property
    def steps_beyond(self) -> int:
        """How many steps were taken since the last update, before the assignment that follows it."""
        return self._overlap.steps_done

    @property
    def delay_steps(self) -> int:
        """How many steps after an update its answer is used, as the device says or else the hub.

        It is never more than the update had: the answer is used before the next update leaves.
        """
        if self._limits.delay_steps is not None:
            return min(self._limits.delay_steps, self._steps_asked)
        return 0 if self._welcome is None else min(self._welcome.delay_steps, self._steps_asked)

    @property
    def _waits_exactly(self) -> bool:
        """Whether a number of steps says when an answer is used, and not when it arrives."""
        has_own = self._limits.delay_steps is not None
        return has_own or (self._welcome is not None and self._welcome.delay_steps > 0)

    def recall(self, push: Push, model: ModelKey) -> None:
        """Resume with an update of this model that an earlier start made; call this before `DeviceCore.begin`."""
        self.pending.recall(push, model)
        self._move("pushing")

    def recall_model(self, model: ModelKey, version: ModelVersion, checksum: int) -> None:
        """Resume with a version that an earlier start held; call this before `DeviceCore.begin`."""
        self._recalled = model, version, checksum

    def check(self) -> None:
        """Raise `AssertionError` if the state contradicts itself; cheap enough to call after every event."""
        push = self.pending.push
        has_graph = self._has_graph or self._welcome is None or self._welcome.graph is None
        assert self.state != "installing" or self._installing is not None, "installing nothing"
        assert self.state in ("fetching_graph", "pushing", "idle") or has_graph, "at work without the graph"
        assert self.state != "installing" or self.connected, "installing without a hub"
        assert self.state != "pushing" or push is not None, "pushing nothing"
        assert self.state != "training" or self.version is not None, "training from no version"
        assert push is None or push.seq == self.pending.seq_last + 1, "a push that is not the next"

    def _move(self, state: WorkState) -> None:
        """Change the state; raises `TransitionError` if `WORK` does not allow it."""
        check_move(WORK, self.state, state, "a device's work")
        self.state = state

    def _ignore(self, name: str, *, normal: bool = False) -> list[DeviceEffect]:
        return self._unexpected.ignore(f"{name} while {self.state}", normal=normal)

    def handle(self, event: WorkEvent, now_s: float) -> list[DeviceEffect]:
        """Handle the result of an effect of this work."""
        match event:
            case Trained():
                return self._trained(event, now_s)
            case OverlapTrained():
                return self._overlap_trained(event.result, now_s)
            case ModelArrived():
                return self._model_arrived(event.assignment, now_s)
            case ModelInstalled():
                return self._model_installed(event)
            case InstallFailed():
                return self._install_failed(event, now_s)
            case Kept():
                return self._kept(event.seq, now_s)
            case GraphHeld() | GraphMissing() | GraphBroken() | GraphForged():
                return self._graph_known(event, now_s)

    # -- the link --------------------------------------------------------------------------------------------

    def welcomed(self, welcome: Welcome, now_s: float) -> list[DeviceEffect]:
        """Agree with the hub on the last update; then repeat what was not answered, or ask for an assignment."""
        self._welcome, self.connected = welcome, True
        self._spoke_again = False
        self.push_codec = welcome.push_codec
        effects: list[DeviceEffect] = []
        if self._recalled is not None:
            model, version, checksum = self._recalled
            if model == ModelKey.of(welcome):
                self.version, self._held_checksum = version, checksum
            self._recalled = None
        if self.pending.drop_foreign(welcome):
            effects.append(PutAside("an update of another model than this hub's"))
        if dropped := self.pending.agree(welcome.seq_last, welcome.checksum_last):
            effects.append(DeviceReport("warning", dropped))
        if self.state == "pushing" and self.pending.push is None:
            self._move("idle")
        if welcome.graph is None or self._has_graph:
            return effects + self._join(now_s)
        self._move("fetching_graph")
        self._wait(now_s)
        return [*effects, FindGraph(welcome.graph)]

    def cut_off(self) -> list[DeviceEffect]:
        """Continue without the hub; give up a model that was arriving."""
        self.connected, self.needs_bytes, self._arrived = False, 0, False
        if self.state == "installing":
            self._move("idle")
        return self._train_on()

    def pause(self, *, training: bool) -> list[DeviceEffect]:
        """Continue without the hub, as long as that takes; or take no steps until `resume`."""
        self._pause = "training" if training else "still"
        return self.cut_off()

    def resume(self) -> None:
        """Train again as the limits say."""
        self._pause = None

    def hub_is_busy(self, retry_after_s: float | None, now_s: float, *, rest: str | None) -> list[DeviceEffect]:
        """Repeat the message later; train meanwhile as without a hub, unless told why to `rest`."""
        retry_after_s = retry_after_s or 1.0
        if rest is not None:
            self._speak_at_s = now_s + retry_after_s
            self._busy = self._trains_at_rest
            told: list[DeviceEffect] = [DeviceReport("resting", rest)] if retry_after_s >= RESTING_S else []
            return told + self._train_on() if self._trains_at_rest else told
        spread_s = min(retry_after_s, 2.0 * BACKOFF_MAX_S) * self._random.uniform(0.0, 0.5)
        self._speak_at_s = now_s + retry_after_s + spread_s
        self._busy = True
        return self._train_on()

    def back_off(self, now_s: float) -> None:
        """Repeat the message in a few seconds: the hub could not read it, or the device not the hub's payload."""
        self._speak_at_s = now_s + BACKOFF_MAX_S * self._random.uniform(0.5, 1.0)

    def transfer_moved(self, now_s: float) -> list[DeviceEffect]:
        """Wait longer for the answer while a payload moves."""
        self._wait(now_s)
        return []

    def next_deadline_s(self) -> float:
        """Return when `tick` is next due while the hub can be reached; infinity if never."""
        waits_for_itself = self.state == "training" or self._arrived
        return math.inf if waits_for_itself else self._speak_at_s

    def tick(self, now_s: float) -> list[DeviceEffect]:
        """Repeat the message that got no answer."""
        if now_s < self.next_deadline_s():
            return []
        self._spoke_again = True
        return self._speak(now_s)

    def _join(self, now_s: float) -> list[DeviceEffect]:
        """Prepare to train what the hub describes unless that was done; then send what is due."""
        assert self._welcome is not None
        effects: list[DeviceEffect] = []
        if self._prepared_for != self._welcome.settings:
            self._prepared_for = self._welcome.settings
            effects.append(PrepareTraining(self._welcome))
        if self.state in ("fetching_graph", "installing"):
            self._move("idle")
        if self.state != "training":
            effects += self._speak(now_s)
        return effects

    def _speak(self, now_s: float) -> list[DeviceEffect]:
        """Send, or send again, the message whose answer the work waits for."""
        assert self._welcome is not None
        self._wait(now_s)
        if not self._day_bears(self._bytes_of_next(), now_s):
            return []
        if self.state == "fetching_graph":
            return [SendToHub(FetchGraph(self._welcome.session))]
        if (push := self.pending.say(self._welcome.session)) is not None:
            self._move("pushing")
            return [SendPush(push)]
        self._move("idle")
        return [SendToHub(Fetch(self._welcome.session, self.version, held_checksum=self._held_checksum))]

    def _bytes_of_next(self) -> int:
        """Return the most bytes of what is due next: of the graph, of the update, or of a model and its update."""
        assert self._welcome is not None
        if self.state == "fetching_graph":
            return self._welcome.graph_bytes
        if self.pending.push is not None:
            return self.pending.push.payload_bytes
        return (self._model_bytes or self._raw_bytes) + self._bytes_of_update

    @property
    def _raw_bytes(self) -> int:
        """What a model or an update takes as float32: codecs make less of it."""
        assert self._welcome is not None
        return 4 * self._welcome.spec.length

    @property
    def _bytes_of_update(self) -> int:
        return self._update_bytes or self._raw_bytes

    def _day_bears(self, payload_bytes: int, now_s: float) -> bool:
        """Whether the day's bytes bear these payloads; if not, note that, and the hub will be left."""
        borne = self._data_quota.bears(payload_bytes, now_s)
        self.needs_bytes = 0 if borne else needed_bytes(payload_bytes)
        return borne

    def _wait(self, now_s: float) -> None:
        """Give the hub one lease to answer before the message is repeated."""
        assert self._welcome is not None
        self._speak_at_s = now_s + self._welcome.lease_s

    # -- the graph -------------------------------------------------------------------------------------------

    def graph_offered(self, graph: GraphHeader, now_s: float) -> list[DeviceEffect]:
        """Receive the hub's graph if it is the one announced."""
        assert self._welcome is not None
        if self.state != "fetching_graph":
            return self._ignore("Graph", normal=self._spoke_again)
        if (graph.fingerprint, graph.payload_bytes) != (self._welcome.graph, self._welcome.graph_bytes):
            return refuse_graph("the hub sends another graph than it announced; do not trust it")
        self._wait(now_s)
        return [TakeGraph(graph)]

    def _graph_known(self, event: GraphEvent, now_s: float) -> list[DeviceEffect]:
        """Join once the graph is here, fetch it if it is not, and end the agent if it is a forgery.

        The hub may be lost while the shell looks for the graph or checks it: then `welcomed` joins later.
        """
        assert self._welcome is not None
        if self.state != "fetching_graph":
            return self._ignore(type(event).__name__, normal=not isinstance(event, GraphForged))
        match event:
            case GraphHeld():
                self._has_graph = True
                way = "fetched" if event.fetched else "from the cache"
                effects: list[DeviceEffect] = [DeviceReport("graph", f"{way}, {self._welcome.graph_bytes} bytes")]
                if self.connected:
                    return effects + self._join(now_s)
                self._move("idle")
                return effects
            case GraphMissing():
                return self._speak(now_s) if self.connected else []
            case GraphBroken():
                self.back_off(now_s)
                return [DeviceReport("warning", event.reason)]
            case GraphForged():
                return refuse_graph(
                    "the hub's graph does not have the fingerprint it was announced with; do not trust this hub"
                )

    # -- the model -------------------------------------------------------------------------------------------

    def assigned(self, assignment: Assignment, now_s: float) -> list[DeviceEffect]:
        """Install an assignment's model, after the answer to the update that it may contain."""
        if self.state == "fetching_graph":
            return self._ignore("Assignment")
        effects = self.acknowledged(assignment.ack, now_s) if assignment.ack is not None else []
        if self.state not in ("idle", "installing"):
            return effects + self._ignore("Assignment", normal=self._spoke_again)
        self.push_codec = assignment.push_codec or self.push_codec
        if assignment.deltas is not None and self.version is None:
            self._move("idle")
            self._speak_at_s = now_s + BACKOFF_MIN_S
            return effects  # the deltas need a model that a power cut took: fetch the whole one
        both_bytes = assignment.payload_bytes + self._bytes_of_update
        if assignment.transfer and not self._day_bears(both_bytes, now_s):
            return effects
        self._move("installing")
        self._installing, self._arrived = assignment, False
        self._wait(now_s)
        return [*effects, InstallModel(assignment)]

    def _model_arrived(self, assignment: Assignment, now_s: float) -> list[DeviceEffect]:
        """Use the model once the steps of the hub's delay are done."""
        if self.state != "installing" or assignment is not self._installing:
            return self._unexpected.ignore("ModelArrived of an earlier assignment", normal=True)
        self._arrived = True
        return self._use_model(now_s)

    def _use_model(self, now_s: float) -> list[DeviceEffect]:
        """Use the model that has arrived, unless steps of the delay are missing: then take these."""
        assert self._installing is not None
        if self._overlap.will_reach(self.delay_steps):
            return self._train_on()
        self._arrived = False
        self._wait(now_s)
        return [UseModel(self._installing)]

    def _model_installed(self, installed: ModelInstalled) -> list[DeviceEffect]:
        """Train from the model."""
        assignment = installed.assignment
        self.version, self._held_checksum = assignment.version, installed.checksum
        if assignment.deltas is None:
            self._model_bytes = assignment.payload_bytes
        # If a second assignment arrived meanwhile, its model is the one in memory in the end.
        if self.state != "installing" or assignment is not self._installing:
            return self._unexpected.ignore("ModelInstalled of an earlier assignment", normal=True)
        self._move("training")
        self._overlap.end()
        # Another implementation of the hub may ask for more steps than the device has said it allows.
        local_steps = min(assignment.local_steps, self._limits.local_steps_max or LOCAL_STEPS_MAX)
        least_steps = 0 if self.delay_steps and self._overlap.steps_done else 1
        self._steps_asked = local_steps
        effects: list[DeviceEffect] = []
        if assignment.learning_rate_factor != self._learning_rate_factor:
            self._learning_rate_factor = assignment.learning_rate_factor
            effects.append(ScaleLearningRate(self._learning_rate_factor))
        return [*effects, Train(max(least_steps, local_steps - self._overlap.steps_done))]

    def _install_failed(self, failed: InstallFailed, now_s: float) -> list[DeviceEffect]:
        """Ask again soon."""
        if failed.spoilt:
            self.version = self._held_checksum = None
        if self.state == "installing":
            self._move("idle")
            self._speak_at_s = now_s + BACKOFF_MIN_S
        return [DeviceReport("warning", failed.reason)]

    # -- training and the update -----------------------------------------------------------------------------

    def _trained(self, result: Trained, now_s: float) -> list[DeviceEffect]:
        """Make an update of the steps, push it if the hub can be reached, and train further if allowed.

        The update includes the overlapping steps since the last one. Without the hub it waits for `welcomed`.
        """
        if self.state != "training":
            return self._ignore("Trained")
        assert self.version is not None
        assert self._welcome is not None
        self._move("pushing")
        before = self._overlap.begin()
        if before is not None:
            result = result.after(before)
        push = Push(
            session=self._welcome.session,
            seq=self.pending.seq_last + 1,
            base=self.version,
            local_steps=result.local_steps,
            examples=result.examples,
            loss_mean=result.loss_mean,
            loss_variance=result.loss_variance,
            step_s=result.step_s,
            codec=result.codec,
            checksum=result.checksum,
            payload_bytes=result.payload_bytes,
            score=result.score,
            overlap_steps=0 if before is None else before.local_steps,
            base_loss=result.base_loss,
            held_checksum=self._held_checksum,
            metrics=result.metrics,
            validation_loss=result.validation_loss,
        )
        self.pending.make(push)
        self._update_bytes = push.payload_bytes
        self._busy = False
        effects = self._speak(now_s) if self.connected else []
        return effects + self._train_on()

    def _overlap_trained(self, result: Trained, now_s: float) -> list[DeviceEffect]:
        """Count the steps; train further if more are allowed by now, or use the model that waited for them."""
        self._overlap.add(result)
        return self._use_model(now_s) if self._arrived else self._train_on()

    def _train_on(self) -> list[DeviceEffect]:
        """Train while the device waits for a model; take more steps if the hub cannot be reached or is busy."""
        states = ("idle", "pushing", "installing") if self._waits_exactly else ("idle", "pushing")
        if self.state not in states or self._welcome is None or self._pause == "still":
            return []
        if self._pause == "training":
            return self._overlap.train(LOCAL_STEPS_MAX, offline=False)
        if self._waits_exactly:
            return self._overlap.train(self.delay_steps, offline=False)
        offline = self._busy or not self.connected
        return self._overlap.train(self._welcome.overlap_steps_max, offline=offline)

    def _kept(self, seq: int, now_s: float) -> list[DeviceEffect]:
        """Push the update with this number, now that the disk holds it."""
        self._overlap.interrupted()  # training had made way for the write
        push = self.pending.push
        if push is None or push.seq != seq or self.state != "pushing":
            return self._unexpected.ignore("Kept of an earlier update", normal=True) + self._train_on()
        return (self._speak(now_s) if self.connected else []) + self._train_on()

    def acknowledged(self, ack: Ack, now_s: float) -> list[DeviceEffect]:
        """Handle the hub's answer to the update; the assignment comes with it, or later."""
        if self.state == "fetching_graph":
            return self._ignore("Ack")  # an update from the spool is sent again once the graph is here
        if not self.pending.answered(ack):
            return self._unexpected.ignore("Ack of another update", normal=self._spoke_again)
        self._busy = False
        self._move("idle")
        self.updates_answered += 1
        self._wait(now_s)
        if is_preempted(ack.outcome) or ack.outcome == Rejected("not_finite"):
            self._overlap.drop()  # steps from there on are no better
        return [*self._answers.reports(ack), ResolvePush(ack.outcome)]


def refuse_graph(sentence: str) -> list[DeviceEffect]:
    """End the agent: the hub's graph is not to be trusted."""
    return [EndAgent("graph refused", GraphError(sentence))]
