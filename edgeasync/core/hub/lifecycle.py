"""Decides when to save a run, and when to end it. Part of `HubCore`."""

import math
from typing import Literal

import msgspec

from edgeasync.core.hub.effects import Broadcast, EndHub, Evaluate, HubEffect, HubReport, Save
from edgeasync.core.hub.events import Evaluated, HubEvent, HubStopRequested, Ticked
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.protocol.messages import Goodbye


class LifecycleState(msgspec.Struct):
    """The durable fields of `Lifecycle`, about checkpoints and the end of training.

    `saved_version` and `saved_updates` describe the last checkpoint. If `evaluates_last` is set,
    training has finished, and the hub evaluates the last version before it ends.
    """

    save_at_s: float
    saved_version: int
    stop_at_s: float
    saved_updates: int = 0
    stopped: bool = False
    evaluates_last: bool = False


class Lifecycle:
    """Requests checkpoints, and ends training once a stop condition is met."""

    def __init__(
        self, members: Membership, policy_engine: PolicyEngine, settings: HubCoreSettings, now_s: float
    ) -> None:
        self._members = members
        self._policy_engine = policy_engine
        self._settings = settings
        self._checkpoint_every_s = settings.checkpoint.every_s
        self._checkpoint_every_updates = settings.checkpoint.every_updates
        minutes = settings.stop.minutes
        self.state = LifecycleState(
            save_at_s=now_s + self._checkpoint_every_s,
            saved_version=policy_engine.state.version,
            stop_at_s=math.inf if minutes is None else now_s + 60.0 * minutes,
        )

    def next_deadline_s(self) -> float:
        """Return the next time at which a checkpoint or the end is due, even without an event."""
        state = self.state
        if self._policy_engine.state.version != state.saved_version:
            return min(state.stop_at_s, state.save_at_s)
        return state.stop_at_s

    def save_or_stop(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Return the last effects of an event: the end of training or a checkpoint, if due."""
        save = self._save_if_due(event, now_s)
        if self.state.stopped:
            return []  # `stop` has requested a checkpoint
        return self._stop_if_due(event, now_s) or save

    def _save_if_due(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        """Request a checkpoint if it is due and there is a new version."""
        state, model = self.state, self._policy_engine.state
        if model.version == state.saved_version:
            return []
        due = model.updates_applied - state.saved_updates >= self._checkpoint_every_updates
        if not due and isinstance(event, Ticked) and now_s >= state.save_at_s:
            state.save_at_s = now_s + self._checkpoint_every_s
            due = True
        if not due:
            return []
        state.saved_version, state.saved_updates = model.version, model.updates_applied
        return [Save()]

    def _stop_if_due(self, event: HubEvent, now_s: float) -> list[HubEffect]:
        updates = self._settings.stop.updates
        if updates is not None and self._policy_engine.state.updates_applied >= updates:
            return self.stop("finished", f"{self._policy_engine.state.updates_applied} updates applied", now_s)
        if reached := self._policy_engine.state.evaluations.reached:
            return self.stop("finished", reached, now_s)
        if isinstance(event, Ticked) and now_s >= self.state.stop_at_s:
            return self.stop("finished", "the training time of stop.minutes has passed", now_s)
        return []

    def stop(self, reason: Literal["finished", "stopping"], detail: str, now_s: float) -> list[HubEffect]:
        """Send `Goodbye`, fold the buffered updates, save, and end.

        If training has finished, the hub evaluates the last version before it ends.
        """
        self.state.stopped = True
        live = tuple([member.peer for member in self._members.members.values() if member.live and member.peer])
        last = self._policy_engine.fold(now_s) if self._policy_engine.gathering.count else []
        effects = [HubReport(reason, detail=detail), Broadcast(live, Goodbye(reason)), *last, Save()]
        if reason == "finished" and self._policy_engine.wants_last_evaluation:
            self.state.evaluates_last = True
            return [*effects, Evaluate()]
        return [*effects, EndHub(reason)]

    def end_evaluated(self, event: Evaluated | HubStopRequested, now_s: float) -> list[HubEffect]:
        """End once the last version is evaluated; if a stop is requested, end immediately."""
        effects: list[HubEffect] = []
        if isinstance(event, Evaluated):
            model = self._policy_engine.state
            effects += self._policy_engine.evaluations.observe(event, model.updates_applied, now_s)
            if event.number != model.version:  # this evaluation began before training ended
                return [*effects, Evaluate()]
            effects.append(Save())
        self.state.evaluates_last = False
        return [*effects, EndHub("finished")]
