"""Counts, reports and ignores messages and results that do not fit the state."""

from collections import Counter

from edgeasync.core.device.effects import DeviceEffect, DeviceReport


class UnexpectedEvents:
    """Counts ignored events, by a text such as "Assignment while training".

    The first event of each kind since the last welcome is reported. A `normal` event is counted,
    but not reported. Examples are a second answer to a repeated message, or an outdated result of
    the device's own work.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: set[str] = set()

    def welcomed(self) -> None:
        """Record a welcome: from now on, the first event of each kind is reported again."""
        self._reported.clear()

    def ignore(self, kind: str, *, normal: bool = False) -> list[DeviceEffect]:
        """Count an ignored event; return a report if its kind is new and it is not `normal`."""
        self.counts[kind] += 1
        if normal or kind in self._reported:
            return []
        self._reported.add(kind)
        return [DeviceReport("unexpected", f"ignoring an unexpected message or result: {kind}")]
