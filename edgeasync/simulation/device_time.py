"""What a simulated device notices of time: its own clock, and whether it is suspended."""

from collections.abc import Callable

from edgeasync.core.engine.clock import OffsetClock
from edgeasync.simulation.clock import VirtualClock


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
