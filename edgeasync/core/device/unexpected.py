"""Counts, reports and ignores messages and results that do not fit the current state."""

from collections import Counter

from edgeasync.core.device.effects import DeviceEffect, DeviceReport


class UnexpectedEvents:
    """Counts events that do not fit, by kind: a short text such as "Assignment while training".

    The first of each kind since the last welcome is reported. An event that is `normal` is only counted: a second
    answer to a message that was sent twice, or a result of the device's own work that comes after the link broke
    or after the hub sent something newer. The recorder has those as well.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: set[str] = set()

    def welcomed(self) -> None:
        """Report the first of each kind again."""
        self._reported.clear()

    def ignore(self, kind: str, *, normal: bool = False) -> list[DeviceEffect]:
        """Count an event that is ignored; return its report, if it is the first of its kind and not `normal`."""
        self.counts[kind] += 1
        if normal or kind in self._reported:
            return []
        self._reported.add(kind)
        return [DeviceReport("unexpected", f"a message or result that does not fit: {kind}; it is ignored")]
