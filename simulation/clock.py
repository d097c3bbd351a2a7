"""Virtual time: a heap of things to do, done in order of time and then of arrangement. And a device's own time."""

import heapq
from collections.abc import Callable

from edgeasync.core.engine.clock import OffsetClock


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


class DeviceTime:
    """A clock that may jump, or stand still while the device is suspended; what happens meanwhile is held back."""

    def __init__(self, clock: VirtualClock) -> None:
        self.suspended = False
        self.tick_at_s: float | None = None
        """The virtual time at which the next tick is arranged."""
        self._clock = clock
        self._own = OffsetClock(self._virtual_s, clock.now_s)
        self._held_back: list[Callable[[], None]] = []

    @property
    def now_s(self) -> float:
        """What the clock shows."""
        return self._own()

    def when(self, time_s: float) -> float:
        """Return the virtual time at which the clock shows at least this."""
        return self._own.when(time_s)

    def jump(self, by_s: float) -> None:
        """Let the clock show a later time from now on."""
        self._own = OffsetClock(self._own.source, self.now_s + by_s)
        self.tick_at_s = None

    def suspend(self, *, clock_stands: bool) -> None:
        """Hold back what happens from now on; the clock may stand still."""
        if not self.suspended:
            self.suspended = True
            if clock_stands:
                self._own = OffsetClock(lambda: 0.0, self.now_s)

    def hold_back(self, action: Callable[[], None]) -> None:
        """Do something once the device resumes."""
        self._held_back.append(action)

    def resume(self) -> None:
        """Do what was held back."""
        held_back = self._held_back
        self.reset()
        for action in held_back:
            action()

    def reset(self) -> None:
        """Be awake, with nothing held back and no tick arranged."""
        self.suspended, self.tick_at_s, self._held_back = False, None, []
        self._own = OffsetClock(self._virtual_s, self.now_s)

    def _virtual_s(self) -> float:
        return self._clock.now_s
