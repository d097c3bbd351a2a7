"""Converts a hub's decisions into events for callbacks, and ends a run when a condition is met."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.effects import Fold, HubEffect, HubReport
from edgeasync.core.hub.events import Evaluated, HubEvent, PushArrived
from edgeasync.core.hub.outcomes import first_outcome, outcome_name
from edgeasync.protocol.messages import FirstOutcome, Rejected
from edgeasync.runtime.hub import HubRuntime
from edgeasync.sdk import events
from edgeasync.sdk.stop import Stop, TrainingProgress

LOG = logging.getLogger("edgeasync.hub")

NOT_FINITE_MAX = 10
"""Number of consecutive non-finite updates after which a device counts as diverged."""

_LEFT = ("left", "lost", "quarantined", "revoked")
_JOINED = ("joined", "rejoined", "reconnected")
_ODD = ("alarm", "excluded", "not_writing", "released", "warning")


def event_of(
    name: str, device: str, detail: str, time_s: float, figures: Mapping[str, float]
) -> events.Event | None:
    """Convert a hub's report into an event.

    Return `None` unless a device has joined or left, or the report is a warning.
    """
    if name in _JOINED:
        return events.Join(time_s=time_s, device=device)
    if name in _LEFT:
        return events.Leave(time_s=time_s, device=device, detail=detail)
    if name in _ODD:
        return events.Alert(time_s=time_s, device=device, detail=detail, figures=dict(figures))
    return None


class Observer:
    """Observes all events and reports of a hub's core, on the hub's event loop.

    `tell` is called with each event once the event is on disk. `listening` is called when devices
    can join. With `ends_diverged`, the run ends when the updates of all devices are not finite.
    """

    def __init__(
        self,
        until: Stop | None,
        examples: int,
        tell: Callable[[events.Event], None],
        listening: Callable[[], None] = lambda: None,
        *,
        ends_diverged: bool = False,
    ) -> None:
        self.noted: list[events.Event] = []
        """All events except updates and versions, which may be too many to store."""
        self.now_s = 0.0
        """The hub's time at the last event, in seconds."""
        self.reason = ""
        """The reason why the run has finished; empty if the hub was stopped."""
        self._until = until or Stop()
        self._examples = examples
        self._tell_now = tell
        self._listening = listening
        self._began_s: float | None = None
        self._trained = 0
        self._ends_diverged = ends_diverged
        self._not_finite: Counter[str] = Counter()
        """The number of consecutive non-finite updates per device."""
        self._diverged: set[str] = set()
        """Devices with at least `NOT_FINITE_MAX` consecutive non-finite updates."""
        self._told_diverged = False

    def watch(self, hub: HubRuntime, loop: asyncio.AbstractEventLoop) -> None:
        """Start to observe a hub that will run on this loop; call this before the hub runs."""
        self._hub, self._loop = hub, loop

    def end(self, reason: str) -> None:
        """Send the event that the run has ended."""
        self._tell_now(events.End(time_s=self.now_s, reason=reason))

    def __call__(self, event: HubEvent, effects: list[HubEffect], now_s: float) -> None:
        """Process an event of the core and its effects."""
        if self._began_s is None:
            self._began_s = now_s
        self.now_s = now_s
        if isinstance(event, PushArrived):
            self._on_push(event, effects, now_s)
        for effect in effects:
            if isinstance(effect, Fold):
                self._on_version(effect, now_s)
            elif isinstance(effect, HubReport):
                self._on_decided(effect, now_s)

    def _on_decided(self, report: HubReport, now_s: float) -> None:
        """Convert a report of the core into an event, and send it once it is on disk."""
        told = event_of(report.event, report.device_id, report.detail, now_s, report.figures)
        if isinstance(told, events.Leave):
            self._diverged.discard(report.device_id)
        elif report.event == "finished":
            self.reason = self.reason or report.detail
        elif report.event == "evaluated":
            found = self._hub.core.policy_engine.state.evaluations.last
            assert found is not None
            told = events.Evaluation(time_s=now_s, version=found.number, loss=found.loss, accuracy=found.accuracy)
        if told is not None:
            self._hub.show(partial(self._note, told))

    def on_report(self, report: HubReport) -> None:
        """Process a report of the hub, unless it was already processed as a decision of the core."""
        if report.decided_s is not None:
            return
        if report.event == "listening":
            self._listening()
        told = event_of(report.event, report.device_id, report.detail, self.now_s, report.figures)
        if told is not None:
            self._note(told)

    def on_best(self, restore: Callable[[Any], Any], snapshot: Snapshot, found: Evaluated) -> None:
        """Send the best model so far; `restore` converts it into a model of the user's type."""
        self._tell_now(events.Best(
            time_s=self.now_s,
            version=snapshot.number,
            loss=found.loss,
            accuracy=found.accuracy,
            arrays=self._hub.spec.views(snapshot.vector),
            restore=restore,
        ))  # fmt: skip

    def _on_push(self, event: PushArrived, effects: list[HubEffect], now_s: float) -> None:
        core, push = self._hub.core, event.push
        member, outcome = core.members.by_peer(event.peer), first_outcome(effects)
        if member is None or outcome is None:
            return
        measurements = member.measurements
        if not isinstance(outcome, Rejected):
            self._trained += push.examples
        if self._not_finite or isinstance(outcome, Rejected):
            self._watch_divergence(member.device_id, outcome)
        self._tell(events.Update(
            time_s=now_s,
            device=member.device_id,
            number=push.seq,
            outcome=outcome_name(outcome),
            version=core.version,
            loss=measurements.loss_mean,
            examples=push.examples,
            local_steps=measurements.local_steps,
            staleness=measurements.staleness,
            metrics=push.metrics or {},
        ))  # fmt: skip
        epochs = self._until.epochs
        if epochs is not None and self._trained >= epochs * self._examples:
            self.finish(f"{epochs:g} passes over the data")

    def _watch_divergence(self, device_id: str, outcome: FirstOutcome) -> None:
        """Warn once if the updates of all devices are not finite any more."""
        if outcome != Rejected("not_finite"):
            self._not_finite.pop(device_id, None)
            self._diverged.discard(device_id)
            self._told_diverged = False
            return
        self._not_finite[device_id] += 1
        if self._not_finite[device_id] < NOT_FINITE_MAX:
            return
        self._diverged.add(device_id)
        # Checked at each update, because the last healthy device may have left.
        if self._told_diverged or len(self._diverged) < self._hub.core.members.live_count:
            return
        self._told_diverged = True
        detail = (
            f"diverged: the last {NOT_FINITE_MAX} updates of every device were not finite; "
            "lower the learning rate, or check the data"
        )
        self._note(events.Alert(time_s=self.now_s, device="", detail=detail))
        if self._ends_diverged:
            self.finish(detail)

    def _on_version(self, fold: Fold, now_s: float) -> None:
        self._tell(events.Version(time_s=now_s, version=fold.number, updates=len(fold.handles)))
        when, core = self._until.when, self._hub.core
        if when is None:
            return
        progress = TrainingProgress(
            updates=core.updates_applied,
            version=core.version,
            seconds=now_s - (self._began_s or 0.0),
            epochs=self._trained / self._examples if self._examples else 0.0,
            loss=core.members.loss(),
        )
        if when(progress):
            self.finish("Stop(when=...) returned true")

    def finish_soon(self, reason: str) -> None:
        """End the run for all devices; may be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self._loop.call_soon_threadsafe(self.finish, reason)

    def finish(self, reason: str) -> None:
        """End the run for all devices; an earlier reason is kept. Call it on the loop."""
        if not self.reason:
            self.reason = reason
            # The core may still be processing the event that caused this.
            self._loop.call_soon(partial(self._hub.request_stop, finished=True))

    def _tell(self, event: events.Event) -> None:
        """Send an event once it is on disk."""
        self._hub.show(partial(self._tell_now, event))

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.Alert):
            LOG.warning("%s", " ".join(filter(None, (event.device, event.detail))))
        self.noted.append(event)
        self._tell_now(event)
