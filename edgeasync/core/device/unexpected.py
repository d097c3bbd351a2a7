"""Counts, reports and ignores messages and results that do not fit the state."""

from collections import Counter

from edgeasync.core.device.effects import DeviceEffect, DeviceReport


class UnexpectedEvents:
    """Counts events that do not fit, by a text such as "Assignment while training".

    The first of each kind since the last welcome is reported. A `normal` event is only counted,
    such as a second answer to a repeated message, or a result of the device's own work that is
    outdated.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: set[str] = set()

    def welcomed(self) -> None:
        """Report the first event of each kind again."""
        self._reported.clear()

    def ignore(self, kind: str, *, normal: bool = False) -> list[DeviceEffect]:
        """Count an ignored event; return a report if it is new and not `normal`."""
        self.counts[kind] += 1
        if normal or kind in self._reported:
            return []
        self._reported.add(kind)
        return [DeviceReport("unexpected", f"ignoring an unexpected message or result: {kind}")]
