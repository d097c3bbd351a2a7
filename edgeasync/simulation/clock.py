"""Virtual time: a heap of things to do, done in order of time and then of arrangement."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Time passes only from one thing to do to the next, so a run is exactly repeatable."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do `action` in `delay_s` seconds; at once, but after all that is already due, if it is 0."""
        self.at(self.now_s + delay_s, action)

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Do `action` at a time, in the order of arrangement with what else is due then; now if it is past."""
        self._count += 1
        heapq.heappush(self._due, (max(self.now_s, time_s), self._count, action))

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until `until()` holds; return whether it did before `limit_s` of virtual time."""
        while not until():
            if not self._due or self._due[0][0] > limit_s:
                self.now_s = max(self.now_s, limit_s)
                return False
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        return True
