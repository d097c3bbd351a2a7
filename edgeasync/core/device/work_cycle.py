"""`WorkCycle`: the device's work for its hub, as a state machine.

Its state is `idle` (it waits for an assignment), `fetching_graph` (it needs the hub's training
graph), `installing` (the payload of an assignment is arriving), `training`, or `pushing` (an update
is unanswered). The connection may be lost in any state. Training then continues, and an update is
sent again under the same number until it is answered.
"""

import math
from random import Random
from typing import Literal

import msgspec

from edgeasync.core.device import effects, events
from edgeasync.core.device.answer_reports import AnswerReports, is_preempted
from edgeasync.core.device.data_quota import DataQuota, ExchangeCost
from edgeasync.core.device.effects import DeviceEffect
from edgeasync.core.device.graph_fetch import LOCKED_S, GraphFetch
from edgeasync.core.device.handshake import refuse_graph
from edgeasync.core.device.hub_rotation import Repetition
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.overlap import OverlapSteps
from edgeasync.core.device.pending_push import HeldVersion, ModelKey, PendingPush
from edgeasync.core.device.unexpected import UnexpectedEvents
from edgeasync.protocol.messages import (
    Ack,
    Assignment,
    Fetch,
    GraphHeader,
    Push,
    Rejected,
    Welcome,
)
from edgeasync.states import Table, check_move

RESTING_S = 10.0
"""Idle times shorter than this are not reported."""

WorkState = Literal["idle", "fetching_graph", "installing", "training", "pushing"]

WORK: Table[WorkState] = {
    "idle": ("fetching_graph", "installing", "pushing"),
    "fetching_graph": ("idle",),
    "installing": ("training", "idle"),
    "training": ("pushing",),
    "pushing": ("idle", "fetching_graph"),
}
"""The states of the work, and the allowed changes.

In the state `idle`, the device waits for an assignment, in `fetching_graph` for the graph, and in
`pushing` for an answer.
"""


class WorkCycle:
    """The graph, the model, training and the update. Part of `DeviceCore`.

    Methods return effects to execute in order. `DeviceCore` calls `welcomed` when the hub is
    reachable, and `cut_off` when it is lost. It forwards messages only between these two calls.
    `state` is changed only by `_move`, as the table `WORK` allows.
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
        self.held = HeldVersion()
        self.cost = ExchangeCost(data_quota)
        self.pending = PendingPush()
        self.overlap = OverlapSteps(limits)
        self.push_codec = "identity"
        self.updates_answered = 0
        self._repetition = Repetition(random)
        self._answers = AnswerReports()
        self._unexpected = unexpected
        self._trains_at_rest = trains_at_rest
        self._learning_rate_factor = 1.0
        self._prepared_for: dict[str, object] | None = None
        """The hub's settings for which the shell has prepared training."""
        self._graphs = GraphFetch(data_quota)
        self._installing: Assignment | None = None
        self._arrived = False
        """Whether the payload of `_installing` has arrived, and waits until the steps of the delay
        are done.
        """
        self._is_used = False
        """Whether the shell installs that payload. It may be busy for minutes, since a trainer loads
        a large model first. The hub would send the payload again if the device asked.
        """

    @property
    def _hub(self) -> Welcome:
        """The latest `Welcome`, with the hub's settings."""
        assert self.overlap.welcome is not None
        return self.overlap.welcome

    def recall(self, push: Push, model: ModelKey) -> None:
        """Restore an update from before a restart; call before `DeviceCore.begin`."""
        self.pending.recall(push, model)
        self._move("pushing")

    def check(self) -> None:
        """Raise `AssertionError` if the state is inconsistent; cheap for every event."""
        push = self.pending.push
        has_graph = self._graphs.is_complete
        assert self.state != "installing" or self._installing is not None, "installing nothing"
        assert self.state in ("fetching_graph", "pushing", "idle") or has_graph, "at work without the graph"
        assert self.state != "installing" or self.connected, "installing without a hub"
        assert self.state != "pushing" or push is not None, "pushing nothing"
        assert self.state != "training" or self.held.version is not None, "training from no version"
        assert push is None or push.seq == self.pending.seq_last + 1, "a push that is not the next"

    def _move(self, state: WorkState) -> None:
        """Change the state; raises `TransitionError` if `WORK` does not allow it."""
        check_move(WORK, self.state, state, "a device's work")
        self.state = state

    def _ignore(self, name: str, *, normal: bool = False) -> list[DeviceEffect]:
        return self._unexpected.ignore(f"{name} while {self.state}", normal=normal)

    def handle(self, event: events.WorkEvent, now_s: float) -> list[DeviceEffect]:
        """Process the result of an effect of this work."""
        match event:
            case events.Trained():
                return self._trained(event, now_s)
            case events.OverlapTrained():
                return self._overlap_trained(event.result)
            case events.ModelArrived():
                return self._model_arrived(event.assignment)
            case events.ModelInstalled():
                return self._model_installed(event)
            case events.InstallFailed():
                return self._install_failed(event, now_s)
            case events.Kept():
                return self._kept(event.seq, now_s)
            case _:
                return self._graph_known(event, now_s)

    # -- the link --------------------------------------------------------------------------------------------

    def welcomed(self, welcome: Welcome, now_s: float) -> list[DeviceEffect]:
        """Process a `Welcome`.

        Agree with the hub on the last update, then repeat unanswered messages or request an
        assignment.
        """
        self.overlap.welcome = welcome
        self.connected, self._repetition.repeated = True, False
        self.push_codec = welcome.push_codec
        decided: list[DeviceEffect] = []
        self.held.welcomed(welcome)
        self._graphs.welcomed(welcome)
        if self.pending.drop_foreign(welcome):
            decided.append(effects.PutAside("the saved update belongs to another model than this hub's"))
        if dropped := self.pending.agree(welcome.seq_last, welcome.checksum_last):
            decided.append(effects.DeviceReport("warning", dropped))
        if self.state == "pushing" and self.pending.push is None:
            self._move("idle")
        if self._graphs.is_complete:
            return decided + self._join(now_s)
        self._move("fetching_graph")
        self._wait(now_s)
        return decided + self._graphs.look()

    def cut_off(self) -> list[DeviceEffect]:
        """Continue without the hub; abandon a model that has not completely arrived."""
        self.connected, self.cost.needs_bytes, self._arrived = False, 0, False
        if self.state == "installing":
            self._move("idle")
        return self._train_on()

    def pause(self, *, training: bool) -> list[DeviceEffect]:
        """Pause the exchanges.

        If `training` is set, continue to train without the hub, otherwise stop.
        """
        self.overlap.pause = "training" if training else "still"
        return self.cut_off()

    def hub_is_busy(self, retry_after_s: float | None, now_s: float, *, rest: str | None) -> list[DeviceEffect]:
        """Repeat the message later; until then, train as if the hub were unreachable.

        If the hub asks the device to idle, `rest` is its reason, and the device trains only if it
        trains at rest. Otherwise, `rest` is `None`.
        """
        retry_after_s = retry_after_s or 1.0
        if rest is None:
            self._repetition.wait_for_busy(now_s, retry_after_s)
            return self._train_on()
        self._repetition.wait(now_s, retry_after_s)
        self._repetition.busy = self._trains_at_rest
        told: list[DeviceEffect] = [effects.DeviceReport("resting", rest)] if retry_after_s >= RESTING_S else []
        return told + self._train_on() if self._trains_at_rest else told

    def back_off(self, now_s: float) -> None:
        """Repeat the message in a few seconds, because the hub refused it as malformed."""
        self._repetition.back_off(now_s)

    def transfer_moved(self, now_s: float) -> list[DeviceEffect]:
        """Extend the wait for the answer, because part of a payload was transferred."""
        self._wait(now_s)
        return []

    def next_deadline_s(self) -> float:
        """Return when `tick` is next due while the hub is reachable; infinity if it is not due."""
        waits_for_itself = (
            self.state == "training"
            or self._arrived
            or (self.state == "installing" and self._is_used)
            or (self.state == "fetching_graph" and self._graphs.is_busy)
        )
        return math.inf if waits_for_itself else self._repetition.due_s

    def tick(self, now_s: float) -> list[DeviceEffect]:
        """Repeat the unanswered message."""
        if now_s < self.next_deadline_s():
            return []
        self._repetition.repeated = True
        return self._speak(now_s)

    def _join(self, now_s: float) -> list[DeviceEffect]:
        """Prepare for the hub's settings if they are new, then send the message that is due."""
        decided: list[DeviceEffect] = []
        if self._prepared_for != self._hub.settings:
            self._prepared_for = self._hub.settings
            decided.append(effects.PrepareTraining(self._hub))
        if self.state in ("fetching_graph", "installing"):
            self._move("idle")
        if self.state != "training":
            decided += self._speak(now_s)
        return decided

    def _speak(self, now_s: float) -> list[DeviceEffect]:
        """Send or repeat the message whose answer the device waits for."""
        self._wait(now_s)
        if not self.cost.bears(self._bytes_of_next(), now_s):
            return []
        if self.state == "fetching_graph":
            return self._graphs.request()
        if (push := self.pending.say(self._hub.session)) is not None:
            self._move("pushing")
            return [effects.SendPush(push)]
        self._move("idle")
        return [effects.SendToHub(Fetch(self._hub.session, self.held.version, held_checksum=self.held.checksum))]

    def _bytes_of_next(self) -> int:
        """Estimate the bytes of the next exchange: a graph, an update, or a model and an update."""
        if self.state == "fetching_graph":
            return self._graphs.missing_bytes
        if self.pending.push is not None:
            return self.pending.push.payload_bytes
        return self.cost.of_exchange(4 * self._hub.spec.length)

    def _wait(self, now_s: float) -> None:
        """Wait for the answer for the duration of a lease before the message is repeated."""
        self._repetition.wait(now_s, self._hub.lease_s)

    # -- the graph -------------------------------------------------------------------------------------------

    def graph_offered(self, graph: GraphHeader, now_s: float) -> list[DeviceEffect]:
        """Receive the hub's graph or base if the `Welcome` announced it."""
        if self.state != "fetching_graph":
            return self._ignore("Graph", normal=self._repetition.repeated)
        if self._graphs.is_busy:
            return self._ignore("Graph", normal=True)  # it has arrived by an earlier transfer
        self._wait(now_s)
        return self._graphs.offered(graph)

    def _graph_known(self, event: events.GraphEvent, now_s: float) -> list[DeviceEffect]:
        """Process the result of a look-up or a download of the graph or its base.

        If both are stored, join. If one is missing, fetch it. If it is forged, end the agent. If
        the device loses the hub while the shell checks a part, `welcomed` continues later.
        """
        if self.state != "fetching_graph":
            return self._ignore(type(event).__name__, normal=not isinstance(event, events.GraphForged))
        match event:
            case events.GraphHeld():
                return self._graph_held(event, now_s)
            case events.GraphMissing():
                decided = self._graphs.missing(event)
                ends = any(isinstance(effect, effects.EndAgent) for effect in decided)
                return decided + (self._speak(now_s) if self.connected and not ends else [])
            case events.GraphArrived():
                self._graphs.is_busy = True
                return []
            case events.GraphLocked():
                self._repetition.wait(now_s, LOCKED_S)
                return self._graphs.locked()
            case events.GraphBroken():
                told = self._graphs.broken(event)
                self._repetition.back_off(now_s, self._graphs.failures)
                return told
            case events.GraphForged():
                forged = "the fingerprint of the hub's graph or base differs from the announced one"
                return [refuse_graph(f"{forged}; do not trust this hub")]

    def _graph_held(self, event: events.GraphHeld, now_s: float) -> list[DeviceEffect]:
        """Look for the base once the graph is stored; join once both are."""
        decided = self._graphs.held(event)
        if not self._graphs.is_complete:
            return decided + self._graphs.look()
        if self.connected:
            return decided + self._join(now_s)
        self._move("idle")
        return decided

    # -- the model -------------------------------------------------------------------------------------------

    def assigned(self, assignment: Assignment, now_s: float) -> list[DeviceEffect]:
        """Process the answer that an assignment may contain, then install the model."""
        if self.state == "fetching_graph":
            return self._ignore("Assignment")
        decided = self.acknowledged(assignment.ack, now_s) if assignment.ack is not None else []
        if self.state not in ("idle", "installing"):
            return decided + self._ignore("Assignment", normal=self._repetition.repeated)
        self.push_codec = assignment.push_codec or self.push_codec
        if assignment.deltas is not None and self.held.version is None:
            self._move("idle")
            self._repetition.soon(now_s)
            return decided  # the deltas need a model that this device has lost; fetch a whole one
        both_bytes = assignment.payload_bytes + self.cost.of_update(4 * self._hub.spec.length)
        if assignment.transfer and not self.cost.bears(both_bytes, now_s):
            return decided
        self._move("installing")
        self._installing, self._arrived, self._is_used = assignment, False, False
        self._wait(now_s)
        return [*decided, effects.InstallModel(assignment)]

    def _model_arrived(self, assignment: Assignment) -> list[DeviceEffect]:
        """Use the model once the steps of the delay are done."""
        if self.state != "installing" or assignment is not self._installing:
            return self._unexpected.ignore("ModelArrived of an earlier assignment", normal=True)
        self._arrived = True
        return self._use_model()

    def _use_model(self) -> list[DeviceEffect]:
        """Use the model that has arrived; if the delay requires more steps, take them first."""
        assert self._installing is not None
        if self.overlap.awaits_delay:
            return self._train_on()
        self._arrived, self._is_used = False, True
        return [effects.UseModel(self._installing)]

    def _model_installed(self, installed: events.ModelInstalled) -> list[DeviceEffect]:
        """Start to train from the installed model."""
        assignment = installed.assignment
        self.held.install(assignment.version, installed.checksum)
        if assignment.deltas is None:
            self.cost.model_bytes = assignment.payload_bytes
        # If a second assignment arrived meanwhile, its model replaces this one.
        if self.state != "installing" or assignment is not self._installing:
            return self._unexpected.ignore("ModelInstalled of an earlier assignment", normal=True)
        self._move("training")
        local_steps = self.overlap.assign(assignment.local_steps)
        decided: list[DeviceEffect] = []
        if assignment.learning_rate_factor != self._learning_rate_factor:
            self._learning_rate_factor = assignment.learning_rate_factor
            decided.append(effects.ScaleLearningRate(self._learning_rate_factor))
        return [*decided, effects.Train(local_steps)]

    def _install_failed(self, failed: events.InstallFailed, now_s: float) -> list[DeviceEffect]:
        """Request an assignment again soon."""
        if failed.spoilt:
            self.held.lose()
        if self.state == "installing":
            self._move("idle")
            self._repetition.soon(now_s)
        return [effects.DeviceReport("warning", failed.reason)]

    # -- training and the update -----------------------------------------------------------------------------

    def _trained(self, result: events.Trained, now_s: float) -> list[DeviceEffect]:
        """Create an update from the steps, and push it if connected.

        Then continue to train if allowed. The update includes the overlap steps taken since the
        last update. Without a connection, the update is sent by `welcomed`.
        """
        if self.state != "training":
            return self._ignore("Trained")
        assert self.held.version is not None
        self._move("pushing")
        before = self.overlap.begin()
        if before is not None:
            result = result.after(before)
        push = Push(
            session=self._hub.session,
            seq=self.pending.seq_last + 1,
            base=self.held.version,
            overlap_steps=0 if before is None else before.local_steps,
            held_checksum=self.held.checksum,
            **msgspec.structs.asdict(result),
        )
        self.pending.make(push)
        self.cost.update_bytes = push.payload_bytes
        self._repetition.busy = False
        decided = self._speak(now_s) if self.connected else []
        return decided + self._train_on()

    def _overlap_trained(self, result: events.Trained) -> list[DeviceEffect]:
        """Count the steps of overlap.

        If a model waits for them, use it; otherwise, continue to train if allowed.
        """
        self.overlap.add(result)
        return self._use_model() if self._arrived else self._train_on()

    def _train_on(self) -> list[DeviceEffect]:
        """Train while waiting for a model; if the hub is unreachable, more steps are allowed."""
        states = ("idle", "pushing", "installing") if self.overlap.waits_exactly else ("idle", "pushing")
        return (
            self.overlap.train(offline=self._repetition.busy or not self.connected) if self.state in states else []
        )

    def _kept(self, seq: int, now_s: float) -> list[DeviceEffect]:
        """Push the update with this number, which is now on disk."""
        self.overlap.interrupted()  # training was paused for the write
        push = self.pending.push
        if push is None or push.seq != seq or self.state != "pushing":
            return self._unexpected.ignore("Kept of an earlier update", normal=True) + self._train_on()
        return (self._speak(now_s) if self.connected else []) + self._train_on()

    def acknowledged(self, ack: Ack, now_s: float) -> list[DeviceEffect]:
        """Process the hub's answer to the update. An assignment follows."""
        if self.state == "fetching_graph":
            return self._ignore("Ack")  # a recalled update is sent again once the graph is stored
        if not self.pending.answered(ack):
            return self._unexpected.ignore("Ack of another update", normal=self._repetition.repeated)
        self._repetition.busy = False
        self._move("idle")
        self.updates_answered += 1
        self._wait(now_s)
        if is_preempted(ack.outcome) or ack.outcome == Rejected("not_finite"):
            self.overlap.drop()  # later steps have diverged, too
        return [*self._answers.reports(ack), effects.ResolvePush(ack.outcome)]
