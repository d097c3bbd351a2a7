"""The members that changed since a viewer last looked. Part of `Membership`."""

from itertools import islice


class Changes:
    """Device ids of changed members, for a reader that takes a limited number of them at a time.

    An urgent change, such as that of a state, is returned before all others. Otherwise, the oldest
    change comes first.
    """

    def __init__(self) -> None:
        self._urgent: dict[str, None] = {}
        self._others: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def note(self, device_id: str, *, urgent: bool = False) -> None:
        """Record that a member changed."""
        if urgent:
            self._others.pop(device_id, None)
            self._urgent[device_id] = None
        elif device_id not in self._urgent:
            self._others[device_id] = None

    def take(self, count_max: int) -> list[str]:
        """Remove and return device ids, at most `count_max`."""
        taken = list(islice(self._urgent, count_max))
        for device_id in taken:
            del self._urgent[device_id]
        others = list(islice(self._others, count_max - len(taken)))
        for device_id in others:
            del self._others[device_id]
        return taken + others
