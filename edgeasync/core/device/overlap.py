"""The local steps that a device takes after an update until it gets the next model."""

from typing import Literal

from edgeasync.core.device.bounds import LOCAL_STEPS_MAX
from edgeasync.core.device.effects import DeviceEffect, DeviceReport, Train
from edgeasync.core.device.events import Trained
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.protocol.messages import Welcome


class OverlapSteps:
    """Limits and counts the local steps between an update and the next model.

    While the hub is reachable, the hub's limit applies. While the hub is unreachable or busy, the
    larger of the hub's limit and the device's own `alone_steps_max` applies. During a `pause`,
    training either continues without a limit, or stops. The limits apply to the steps since the
    last update. Only one training call runs at a time, since the shell can pause only one.
    """

    def __init__(self, limits: DeviceLimits) -> None:
        self.welcome: Welcome | None = None
        self.pause: Literal["training", "still"] | None = None
        self._limits = limits
        self._assigned_steps = 0
        """The number of local steps in the newest assignment used since the start."""
        self._done: Trained | None = None
        self._asked = self._wanted = 0
        self._running = self._possible = self._dropped = self._told = False

    @property
    def is_allowed(self) -> bool:
        """Whether training may continue between an update and the next model."""
        assert self.welcome is not None
        welcome, own = self.welcome, self._limits.delay_steps or 0
        return max(welcome.overlap_steps_max, welcome.delay_steps, own, self._limits.alone_steps_max) > 0

    @property
    def delay_steps(self) -> int:
        """The number of steps to take after an update before its answer is used.

        It is never larger than the number of steps in the update, since the answer is used before
        the next update is sent.
        """
        delay_steps = self._limits.delay_steps
        if delay_steps is None:
            delay_steps = 0 if self.welcome is None else self.welcome.delay_steps
        return min(delay_steps, self._assigned_steps)

    @property
    def waits_exactly(self) -> bool:
        """Whether the answer is used after a fixed number of steps, not when it arrives."""
        has_own = self._limits.delay_steps is not None
        return has_own or (self.welcome is not None and self.welcome.delay_steps > 0)

    @property
    def steps_done(self) -> int:
        """The number of steps that are not part of an update yet."""
        return 0 if self._done is None else self._done.local_steps

    @property
    def awaits_delay(self) -> bool:
        """Whether the delay requires more steps, and they are still possible."""
        return self._possible and not self._dropped and self.steps_done < self.delay_steps

    def begin(self) -> Trained | None:
        """Return the result of the steps for the new update, and allow training to continue."""
        done, self._done = self._done, None
        self._asked = 0
        self._possible, self._running, self._told = True, False, False
        return done

    def add(self, result: Trained) -> None:
        """Add the result of a training call. Steps that the call did not take remain allowed."""
        self._running = False
        self._possible = self._possible and result.local_steps > 0  # with 0 steps, the trainer has no more
        self._asked -= max(0, self._wanted - result.local_steps)
        if result.local_steps and not self._dropped:
            self._done = result if self._done is None else result.after(self._done)

    def interrupted(self) -> None:
        """Record that the running training call, if any, was paused before its first step."""
        if self._running:
            self._running = False
            self._asked -= self._wanted

    def drop(self) -> None:
        """Drop the steps that were taken, and allow no more steps until the next model."""
        self._done, self._dropped = None, True

    def assign(self, local_steps: int) -> int:
        """Return how many steps of an assignment remain; allow no overlap until its update."""
        self._possible = self._running = self._dropped = False
        least_steps = 0 if self.delay_steps and self.steps_done else 1
        # Another hub implementation may assign more steps than the device allows.
        self._assigned_steps = min(local_steps, self._limits.local_steps_max or LOCAL_STEPS_MAX)
        return max(least_steps, self._assigned_steps - self.steps_done)

    def train(self, *, offline: bool) -> list[DeviceEffect]:
        """Return the effect that takes the steps allowed now, unless a training call is running."""
        if self.welcome is None or self.pause == "still":
            return []
        if self.pause == "training":
            return self._take(LOCAL_STEPS_MAX)
        if self.waits_exactly:
            return self._take(self.delay_steps)
        online_max = self.welcome.overlap_steps_max
        if not offline:
            return self._take(online_max)
        alone_max = max(online_max, self._limits.alone_steps_max)
        effects = self._take(alone_max)
        if not effects or self._told or alone_max == online_max:
            return effects
        self._told = True
        return [
            DeviceReport("alone", f"training without the hub for up to {self._wanted} local steps"),
            *effects,
        ]

    def _take(self, steps_max: int) -> list[DeviceEffect]:
        steps = steps_max - self._asked
        if steps < 1 or not self._possible or self._running or self._dropped:
            return []
        self._asked, self._wanted, self._running = steps_max, steps, True
        return [Train(steps, overlap=True)]
