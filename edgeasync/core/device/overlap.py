"""The local steps that a device takes between an update and the next model."""

from edgeasync.core.device.effects import DeviceEffect, DeviceReport, Train
from edgeasync.core.device.events import Trained


class OverlapSteps:
    """Limits training between an update and the next model, and counts its steps.

    While the device can reach the hub, the hub's limit holds. While it cannot, or the hub is busy, the larger of
    the hub's limit and the device's own, `alone_steps_max`, holds. Both limits count from the last update. Only
    one call of training runs at a time, since the shell can pause only one.
    """

    def __init__(self, alone_steps_max: int) -> None:
        self._alone_steps_max = alone_steps_max
        self._done: Trained | None = None
        self._asked = self._wanted = 0
        self._running = self._possible = self._dropped = self._told = False

    @property
    def steps_done(self) -> int:
        """How many steps are not part of an update yet."""
        return 0 if self._done is None else self._done.local_steps

    def will_reach(self, steps: int) -> bool:
        """Whether this number of steps is not reached yet, and can be."""
        return self._possible and not self._dropped and self.steps_done < steps

    def begin(self) -> Trained | None:
        """Return the steps for the update that is made now, and allow training to continue after it."""
        done, self._done = self._done, None
        self._asked = 0
        self._possible, self._running, self._told = True, False, False
        return done

    def add(self, result: Trained) -> None:
        """Add the steps of a call of training that has ended; those that it did not take are allowed later."""
        self._running = False
        self._possible = self._possible and result.local_steps > 0  # a trainer that has no more
        self._asked -= max(0, self._wanted - result.local_steps)
        if result.local_steps and not self._dropped:
            self._done = result if self._done is None else result.after(self._done)

    def interrupted(self) -> None:
        """Note that a call of training was paused before its first step, if one was."""
        if self._running:
            self._running = False
            self._asked -= self._wanted

    def drop(self) -> None:
        """Forget the steps done, and allow no more until a model is installed: training has diverged."""
        self._done, self._dropped = None, True

    def end(self) -> None:
        """Allow no more steps: the next model is installed."""
        self._possible = self._running = self._dropped = False

    def train(self, overlap_steps_max: int, *, offline: bool) -> list[DeviceEffect]:
        """Return the effect that takes the steps allowed now, unless an earlier call still trains."""
        steps_max = max(overlap_steps_max, self._alone_steps_max) if offline else overlap_steps_max
        steps = steps_max - self._asked
        if steps < 1 or not self._possible or self._running or self._dropped:
            return []
        self._asked, self._wanted, self._running = steps_max, steps, True
        effects: list[DeviceEffect] = []
        if offline and not self._told and self._alone_steps_max > overlap_steps_max:
            self._told = True
            effects.append(DeviceReport("alone", f"training on without the hub, for {steps} local steps at most"))
        return [*effects, Train(steps, overlap=True)]
