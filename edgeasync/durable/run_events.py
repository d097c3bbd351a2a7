"""Describe replayed journal entries as lines of `edgeasync replay`."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from edgeasync.core.hub.effects import Fold, HubEffect, HubReport, Restore, SendToDevice
from edgeasync.core.hub.events import HubReceived, PushArrived, Resumed
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.outcomes import first_outcome, is_weighed, outcome_of
from edgeasync.core.hub.refusal import RefusalError
from edgeasync.core.recovery.log import Entry, event_of
from edgeasync.protocol.messages import Duplicate, FirstOutcome, Push, Refuse, Rejected


class ReplayedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """An update that arrived, and its outcome.

    `staleness` is measured in versions. `version` is the newest version after the event. `reason`
    explains why the hub rejected or ignored the update. For a duplicate, it is the earlier outcome.
    `metrics` contains the metrics that the device reported. `delay_steps` is how many of
    the `local_steps` the device took before it used the answer to its previous update.
    """

    event: Literal["update"] = "update"
    entry: int
    hub_s: float
    device: str
    seq: int
    base_lineage: str
    base: int
    local_steps: int
    delay_steps: int
    examples: int
    outcome: str
    reason: str
    staleness: int | None
    loss: float | None
    norm: float | None
    version: int
    metrics: dict[str, float] = {}


class ReplayedEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a version."""

    event: Literal["evaluated"] = "evaluated"
    entry: int
    hub_s: float
    version: int
    loss: float
    accuracy: float | None
    best: bool


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Any other event, such as a device that joins or expires, an alarm, or a new lineage.

    `version` is the newest version after the event. `figures` contains the measured values of an
    alarm.
    """

    event: str
    entry: int
    hub_s: float
    device: str = ""
    detail: str = ""
    figures: dict[str, float] = {}
    lineage: str
    version: int


Line = ReplayedUpdate | ReplayedEvaluation | RunEvent


class RunDescriber:
    """Describes journal entries that have been applied to a core."""

    def __init__(self, core: HubCore) -> None:
        self._core = core
        self._duplicates = core.duplicates

    def lines(self, number: int, entry: Entry, effects: Sequence[HubEffect]) -> Iterator[Line]:
        """Yield the lines for an entry: first the received event, then its effects."""
        core, event = self._core, entry.event
        repeated, self._duplicates = core.duplicates > self._duplicates, core.duplicates
        if isinstance(event, PushArrived):
            yield self._update(number, entry, effects, event.push, event.norm, repeated=repeated)
        elif (
            repeated
            and isinstance(received := event_of(entry), HubReceived)
            and isinstance(received.message, Push)
        ):
            yield self._update(number, entry, effects, received.message, None, repeated=True)
        elif isinstance(event, Resumed):
            detail = "resumed in a new lineage" if event.lineage else "the folder is writable again"
            yield self._happening(number, entry, "resumed", detail=detail)
        for effect in effects:
            match effect:
                case HubReport(event="evaluated"):
                    yield self._evaluation(number, entry)
                case HubReport():
                    yield self._happening(
                        number, entry, effect.event, effect.device_id, effect.detail, figures=effect.figures
                    )
                case Restore():
                    detail = f"restored an earlier model as version {effect.number}"
                    yield self._happening(number, entry, "rolled_back", detail=detail)
                case Fold() if not isinstance(event, PushArrived):
                    detail = f"folded {len(effect.handles)} buffered updates into version {effect.number}"
                    yield self._happening(number, entry, "folded", detail=detail)

    def _update(
        self,
        number: int,
        entry: Entry,
        effects: Sequence[HubEffect],
        push: Push,
        norm: float | None,
        *,
        repeated: bool,
    ) -> ReplayedUpdate:
        member = self._sender(entry, push)
        outcome, reason = _outcome(effects)
        if not reason and outcome == "refused" and self._core.stopped:
            reason = "stopped"
        if repeated:
            outcome = "duplicate"
        first = first_outcome(effects)
        weighed = first is not None and is_weighed(first)
        return ReplayedUpdate(
            entry=number,
            hub_s=entry.now_s,
            device="" if member is None else member.device_id,
            seq=push.seq,
            base_lineage=push.base.lineage,
            base=push.base.number,
            local_steps=push.local_steps,
            delay_steps=push.overlap_steps,
            examples=push.examples,
            outcome=outcome,
            reason=reason,
            staleness=member.measurements.staleness if weighed and member is not None else None,
            loss=push.loss_mean,
            norm=None if norm is None or (math.isnan(norm) and not weighed) else norm,
            version=entry.version,
            metrics=push.metrics or {},
        )

    def _sender(self, entry: Entry, push: Push) -> Member | None:
        try:
            return self._core.members.by_session(push.session)
        except RefusalError:
            return self._core.members.by_peer(getattr(entry.event, "peer", b""))

    def _evaluation(self, number: int, entry: Entry) -> ReplayedEvaluation:
        progress = self._core.policy_engine.state.evaluations
        last = progress.last
        assert last is not None
        return ReplayedEvaluation(
            entry=number,
            hub_s=entry.now_s,
            version=last.number,
            loss=last.loss,
            accuracy=last.accuracy,
            best=progress.best is last,
        )

    def _happening(
        self,
        number: int,
        entry: Entry,
        event: str,
        device: str = "",
        detail: str = "",
        *,
        figures: dict[str, float] | None = None,
    ) -> RunEvent:
        return RunEvent(
            event=event,
            entry=number,
            hub_s=entry.now_s,
            device=device,
            detail=detail,
            figures=figures or {},
            lineage=self._core.lineage,
            version=entry.version,
        )


def _outcome(effects: Sequence[HubEffect]) -> tuple[str, str]:
    """Return the outcome of an update and the reason for it."""
    outcome = outcome_of(effects)
    if outcome is None:
        answers = [effect.message for effect in effects if isinstance(effect, SendToDevice)]
        return "refused", next((answer.code for answer in answers if isinstance(answer, Refuse)), "")
    if isinstance(outcome, Duplicate):
        return "duplicate", _word(outcome.first)
    return _word(outcome), outcome.reason if isinstance(outcome, Rejected) else ""


def _word(outcome: FirstOutcome) -> str:
    return str(outcome.__struct_config__.tag)
