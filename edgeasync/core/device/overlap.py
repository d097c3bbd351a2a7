"""The local steps a device takes ahead, while an update of its own is on its way or cannot leave."""

from edgeasync.core.device.effects import DeviceEffect, Report, Train
from edgeasync.core.device.events import Trained


class OverlapSteps:
    """How far training goes on from an update until the next model comes in, and what was done so far.

    The hub's limit holds while it can be spoken to; `alone_steps_max`, the device's own, if it is larger and the
    hub cannot be reached or takes no updates. Both count from the last update; only one call of training is
    under way at a time, since the shell can end only one.
    """

    def __init__(self, alone_steps_max: int) -> None:
        self.alone_steps_max = alone_steps_max
        self._done: Trained | None = None
        self._asked = 0
        self._running = self._possible = self._dropped = self._told = False

    @property
    def steps_done(self) -> int:
        """Steps taken that no update holds yet."""
        return 0 if self._done is None else self._done.local_steps

    def take(self) -> Trained | None:
        """Return what was done, for the next update; training may go on from there."""
        done, self._done = self._done, None
        self._asked = 0
        self._possible, self._running, self._told = True, False, False
        return done

    def add(self, result: Trained) -> None:
        """Take in the end of a call of training."""
        self._running = False
        if not self._dropped:
            self._done = result if self._done is None else result.after(self._done)

    def drop(self) -> None:
        """Forget what was done, and do no more until a model comes in: it went on from what diverged."""
        self._done, self._dropped = None, True

    def adopted(self) -> None:
        """Take in that the next model is here, and training ahead has ended."""
        self._possible = self._running = self._dropped = False

    def go_on(self, overlap_steps_max: int, *, alone: bool) -> list[DeviceEffect]:
        """Train as far as is allowed now, unless that is under way."""
        steps_max = max(overlap_steps_max, self.alone_steps_max) if alone else overlap_steps_max
        steps = steps_max - self._asked
        if steps < 1 or not self._possible or self._running or self._dropped:
            return []
        self._asked, self._running = steps_max, True
        effects: list[DeviceEffect] = []
        if alone and not self._told and self.alone_steps_max > overlap_steps_max:
            self._told = True
            effects.append(Report("alone", f"training on without the hub, for {steps} local steps at most"))
        return [*effects, Train(steps, ahead=True)]
