"""Reports the hub's answers to updates to the user of the device."""

import msgspec

from edgeasync.core.device.effects import DeviceReport
from edgeasync.protocol.messages import Ack, Duplicate, Outcome, Rejected

DIVERGED = "training diverged, and the hub rejected the update; scale the data or lower the learning rate"
PREEMPTED = "this device's model is far worse than the others' models; it starts over from the hub's model"
QUARANTINED = (
    "an operator of the hub has excluded this device; it continues training, but its updates do not count"
)
RELEASED = "this device's updates count again"


class AnswerReports:
    """Reports answers, new divergence and preemption, and the start and end of quarantine."""

    def __init__(self) -> None:
        self._diverged = self._in_quarantine = self._preempted = False

    def reports(self, ack: Ack) -> list[DeviceReport]:
        """Return the reports of an answer, without repeating those of the previous answer."""
        outcome = ack.outcome
        first = outcome.first if isinstance(outcome, Duplicate) else outcome
        before = self._diverged, self._preempted, self._in_quarantine
        self._diverged = _is(outcome, "not_finite")
        self._preempted, self._in_quarantine = is_preempted(outcome), _is(first, "quarantined")
        diverged, preempted, in_quarantine = before
        found = [DeviceReport("answered", describe(outcome))]
        if self._diverged and not diverged:
            found.append(DeviceReport("warning", DIVERGED))
        if self._preempted and not preempted:
            found.append(DeviceReport("warning", PREEMPTED))
        if self._in_quarantine and not in_quarantine:
            found.append(DeviceReport("quarantined", QUARANTINED))
        elif in_quarantine and not self._in_quarantine:
            found.append(DeviceReport("released", RELEASED))
        return found


def is_preempted(outcome: Outcome) -> bool:
    """Return whether an outcome, possibly a repeated one, asks the device to start over."""
    first = outcome.first if isinstance(outcome, Duplicate) else outcome
    return isinstance(first, Rejected) and first.preempted


def _is(outcome: Outcome, reason: str) -> bool:
    return isinstance(outcome, Rejected) and outcome.reason == reason


def describe(outcome: Outcome) -> str:
    """Return a text that describes an outcome."""
    if isinstance(outcome, Duplicate):
        return f"duplicate of: {describe(outcome.first)}"
    if isinstance(outcome, Rejected):
        return f"rejected {outcome.reason}"
    values = ", ".join(str(value) for value in msgspec.structs.astuple(outcome))
    return f"{type(outcome).__name__.lower()} {values}"
