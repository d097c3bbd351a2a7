"""Messages and results that do not fit the state in which they come: counted, told of, and ignored."""

from collections import Counter

from edgeasync.core.device.effects import DeviceEffect, Report


class UnexpectedEvents:
    """Counts them by kind, a short text such as "Assignment while training".

    The first of a kind since the last welcome is reported. One that is `normal` is only counted, and the recorder
    has it: a second answer to a message that was sent twice, or a result of the device's own work that comes after
    the link has broken or the hub has sent something newer.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported: set[str] = set()

    def welcomed(self) -> None:
        """Report the first of each kind again."""
        self._reported.clear()

    def ignore(self, kind: str, *, normal: bool = False) -> list[DeviceEffect]:
        """Count an event that is ignored; return the report of it, if there is to be one."""
        self.counts[kind] += 1
        if normal or kind in self._reported:
            return []
        self._reported.add(kind)
        return [Report("unexpected", f"a message or result that does not fit: {kind}; it is ignored")]
