"""The hub's latest events, for clients that follow them."""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.effects import HubReport
from edgeasync.protocol.status import RecentEvent

EVENTS_MAX = 4096
"""Maximum number of events to keep. With 10,000 devices, each may need 200 bytes."""


class _Kept(NamedTuple):
    number: int
    event: str
    device: str
    text: bytes


class RecentEvents:
    """Keeps the latest events, each encoded once.

    An answer contains the events after a number that a client received before. Numbers start at 1
    with each start of the hub.
    """

    def __init__(self) -> None:
        self._events: deque[_Kept] = deque(maxlen=EVENTS_MAX)
        self.last = 0
        """The number of the newest event."""

    def note(self, report: HubReport, time_s: float) -> None:
        """Append an event that was reported at this wall-clock time."""
        self.last += 1
        figures: dict[str, float | None] = {**report.figures}
        event = RecentEvent(
            number=self.last,
            event=report.event,
            time=round(time_s, 3),
            device=report.device_id,
            detail=report.detail,
            figures=figures or msgspec.UNSET,
        )
        self._events.append(_Kept(self.last, report.event, report.device_id, msgspec.json.encode(event)))

    def after(self, number: int, lineage: str, sender: Sender) -> bytes:
        """Return the events after a number as JSON of a `RecentEventList`.

        The key of a device gets only events of its own devices and of the whole hub.
        """
        first = self._events[0].number if self._events else self.last + 1
        texts = [
            one.text
            for one in self._since(number)
            if sender.role != "device" or not one.device or sender.speaks_for(one.device)
        ]
        head = {"lineage": lineage, "last": self.last, "missed": max(0, first - number - 1)}
        return msgspec.json.encode({**head, "events": raw_list(texts)})

    def latest(self, count_max: int, after: int, through: int) -> msgspec.Raw:
        """Return the latest events after a number, up to the number `through`, as a JSON array.

        The array has at most `count_max` events, and no evaluations: there is one a second, and the
        history has them.
        """
        texts: list[bytes] = []
        for one in reversed(self._events):
            if one.number <= after or len(texts) == count_max:
                break
            if one.number <= through and one.event != "evaluated":
                texts.append(one.text)
        return raw_list(reversed(texts))

    def of_device(self, device_id: str, count_max: int) -> msgspec.Raw:
        """Return the latest events of a device as a JSON array, at most `count_max`."""
        texts = [one.text for one in self._events if one.device == device_id]
        return raw_list(texts[-count_max:])

    def _since(self, number: int) -> list[_Kept]:
        return list(islice(self._events, max(0, number - self.last + len(self._events)), None))


def raw_list(texts: Iterable[bytes]) -> msgspec.Raw:
    """Return a JSON array of encoded values."""
    return msgspec.Raw(b"[" + b",".join(texts) + b"]")
