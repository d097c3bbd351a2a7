"""Reports of the hub's answers to updates, for the person at the device."""

import msgspec

from edgeasync.core.device.effects import Report
from edgeasync.protocol.messages import Ack, Duplicate, Outcome, Quarantine, Rejected


class AnswerReports:
    """Reports every answer, and once each that training diverges, that a quarantine begins, and that it ends."""

    def __init__(self) -> None:
        self._diverged = self._in_quarantine = False

    def reports(self, ack: Ack) -> list[Report]:
        """Return the reports of an answer."""
        return [Report("answered", describe(ack.outcome)), *self._divergence(ack.outcome), *self._quarantine(ack)]

    def _divergence(self, outcome: Outcome) -> list[Report]:
        """Warn of the first update that was not finite, and again only after another outcome."""
        diverged = outcome == Rejected("not_finite")
        begun, self._diverged = diverged and not self._diverged, diverged
        sentence = "training diverged, and the hub refused the update: scale the data, or lower the learning rate"
        return [Report("warning", sentence)] if begun else []

    def _quarantine(self, ack: Ack) -> list[Report]:
        """Report when the hub's monitor begins to reject this device's updates, and when it accepts them again."""
        quarantine = ack.quarantine
        if quarantine is None and ack.outcome == Rejected("quarantined"):
            quarantine = Quarantine("the hub does not say why", 0)  # a hub of an older version
        before, self._in_quarantine = self._in_quarantine, quarantine is not None
        if self._in_quarantine == before:
            return []
        if quarantine is None:
            return [Report("released", "the updates of this device count again")]
        calm = quarantine.calm_updates
        until = f"after {calm} in a row that are not alarming" if calm else "later"
        detail = f"the updates of this device do not count: {quarantine.cause}; they do again {until}"
        return [Report("quarantined", detail)]


def describe(outcome: Outcome) -> str:
    """Return an outcome in words."""
    if isinstance(outcome, Duplicate):
        return f"duplicate of: {describe(outcome.first)}"
    values = ", ".join(str(value) for value in msgspec.structs.astuple(outcome))
    return f"{type(outcome).__name__.lower()} {values}"
