"""Reports of the hub's answers to updates, for the person at the device."""

import msgspec

from edgeasync.core.device.effects import DeviceReport
from edgeasync.protocol.messages import Ack, Duplicate, Outcome, Rejected


class AnswerReports:
    """Reports every answer, and once each that training diverges, starts over, is in quarantine, and is not."""

    def __init__(self) -> None:
        self._diverged = self._in_quarantine = self._preempted = False

    def reports(self, ack: Ack) -> list[DeviceReport]:
        """Return the reports of an answer."""
        answered = DeviceReport("answered", describe(ack.outcome))
        return [
            answered,
            *self._divergence(ack.outcome),
            *self._preemption(ack.outcome),
            *self._quarantine(ack.outcome),
        ]

    def _preemption(self, outcome: Outcome) -> list[DeviceReport]:
        """Warn when the device starts over, and again only after another outcome."""
        preempted = is_preempted(outcome)
        begun, self._preempted = preempted and not self._preempted, preempted
        sentence = (
            "this device's model was far worse than the others': it drops it, and starts over from the hub's"
        )
        return [DeviceReport("warning", sentence)] if begun else []

    def _divergence(self, outcome: Outcome) -> list[DeviceReport]:
        """Warn of the first update that was not finite, and again only after another outcome."""
        diverged = _is(outcome, "not_finite")
        begun, self._diverged = diverged and not self._diverged, diverged
        sentence = "training diverged, and the hub refused the update: scale the data, or lower the learning rate"
        return [DeviceReport("warning", sentence)] if begun else []

    def _quarantine(self, outcome: Outcome) -> list[DeviceReport]:
        """Report when an operator has excluded this device, and when its updates count again."""
        first = outcome.first if isinstance(outcome, Duplicate) else outcome
        before, self._in_quarantine = self._in_quarantine, _is(first, "quarantined")
        if self._in_quarantine == before:
            return []
        if before:
            return [DeviceReport("released", "the updates of this device count again")]
        detail = "an operator of the hub has excluded this device: it trains on, and its updates do not count"
        return [DeviceReport("quarantined", detail)]


def is_preempted(outcome: Outcome) -> bool:
    """Return whether the hub wants the device to start over; a repeated outcome says it, too."""
    first = outcome.first if isinstance(outcome, Duplicate) else outcome
    return isinstance(first, Rejected) and first.preempted


def _is(outcome: Outcome, reason: str) -> bool:
    return isinstance(outcome, Rejected) and outcome.reason == reason


def describe(outcome: Outcome) -> str:
    """Return an outcome in words."""
    if isinstance(outcome, Duplicate):
        return f"duplicate of: {describe(outcome.first)}"
    if isinstance(outcome, Rejected):
        return f"rejected {outcome.reason}"
    values = ", ".join(str(value) for value in msgspec.structs.astuple(outcome))
    return f"{type(outcome).__name__.lower()} {values}"
