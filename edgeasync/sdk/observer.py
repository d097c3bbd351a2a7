"""Turns what a hub's core decides into events for callbacks, and ends a run by its conditions."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from edgeasync.core.hub.effects import Fold, HubEffect, Report
from edgeasync.core.hub.events import HubEvent, PushArrived
from edgeasync.core.hub.outcomes import first_outcome, outcome_name
from edgeasync.protocol.messages import Rejected
from edgeasync.runtime.hub import Hub
from edgeasync.sdk import events
from edgeasync.sdk.stop import Progress, Stop

LOG = logging.getLogger("edgeasync.hub")

_LEFT = ("left", "lost", "quarantined", "revoked")
_JOINED = ("joined", "rejoined", "reconnected")
_ODD = ("alarm", "warning", "not_writing")


class Observer:
    """Sees every event of a hub's core, on its loop, and what it reports.

    `tell` is given events, and `listening` is called once devices can join.
    """

    def __init__(
        self,
        until: Stop | None,
        examples: int,
        tell: Callable[[events.Event], None],
        listening: Callable[[], None] = lambda: None,
    ) -> None:
        self.noted: list[events.Event] = []
        """All events but updates and versions, which may be many."""
        self.now_s = 0.0
        """The hub's time of the last event."""
        self.reason = ""
        """Why the hub came to its end; empty if it was stopped."""
        self._until = until or Stop()
        self._examples = examples
        self._tell = tell
        self._listening = listening
        self._began_s: float | None = None
        self._trained = 0

    def watch(self, hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
        """Watch a hub that is to run on this loop; call this before it runs."""
        self._hub, self._loop = hub, loop

    def end(self, reason: str) -> None:
        """Tell that the run has ended."""
        self._tell(events.End(time_s=self.now_s, reason=reason))

    def __call__(self, event: HubEvent, effects: list[HubEffect], now_s: float) -> None:
        """See an event with its effects."""
        if self._began_s is None:
            self._began_s = now_s
        self.now_s = now_s
        if isinstance(event, PushArrived):
            self._on_push(event, effects, now_s)
        for effect in effects:
            if isinstance(effect, Fold):
                self._on_version(effect, now_s)

    def on_report(self, report: Report) -> None:
        """See what the hub tells people."""
        of: dict[str, Any] = {"time_s": self.now_s, "device": report.device_id}
        if report.event == "listening":
            self._listening()
        elif report.event in _JOINED:
            self._note(events.Join(**of))
        elif report.event in _LEFT:
            self._note(events.Leave(**of, detail=report.detail))
        elif report.event == "finished":
            self.reason = self.reason or report.detail
        elif report.event in _ODD:
            LOG.warning("%s", " ".join(filter(None, (report.device_id, report.detail))))
            self._note(events.Alert(**of, detail=report.detail))
        elif report.event == "evaluated":
            found = self._hub.core.policy_engine.state.evaluations.last
            assert found is not None
            self._note(
                events.Evaluation(
                    time_s=self.now_s, version=found.number, loss=found.loss, accuracy=found.accuracy
                )
            )

    def _on_push(self, event: PushArrived, effects: list[HubEffect], now_s: float) -> None:
        core, push = self._hub.core, event.push
        member, outcome = core.members.by_peer(event.peer), first_outcome(effects)
        if member is None or outcome is None:
            return
        history = member.history
        if not isinstance(outcome, Rejected):
            self._trained += push.examples
        self._tell(events.Update(
            time_s=now_s,
            device=member.device_id,
            number=push.seq,
            outcome=outcome_name(outcome),
            version=core.version,
            loss=history.loss_mean,
            examples=push.examples,
            local_steps=history.local_steps,
            staleness=history.staleness,
        ))  # fmt: skip
        epochs = self._until.epochs
        if epochs is not None and self._trained >= epochs * self._examples:
            self._stop(f"{epochs:g} passes over the data")

    def _on_version(self, fold: Fold, now_s: float) -> None:
        self._tell(events.Version(time_s=now_s, version=fold.number, updates=len(fold.handles)))
        when, core = self._until.when, self._hub.core
        if when is None:
            return
        progress = Progress(
            updates=core.updates_applied,
            version=core.version,
            seconds=now_s - (self._began_s or 0.0),
            epochs=self._trained / self._examples if self._examples else 0.0,
            loss=core.members.loss(),
        )
        if when(progress):
            self._stop("Stop(when=) said so")

    def _stop(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason
            self._loop.call_soon(self._hub.request_stop)  # not from inside the core's event that led to it

    def _note(self, event: events.Event) -> None:
        self.noted.append(event)
        self._tell(event)
