"""Measurements of one device, which are a bounded number of scalars."""

import math

import msgspec

from edgeasync.measurements.medians import RECENT, add_recent, median, median_of_recent

EXAMPLES_RATE_WEIGHT = 0.3
"""Weight of the latest measurement in a device's moving average of examples per second."""

BASE_LOSSES_MAX = 8
"""Maximum length of each list in a device's `BaseLosses`."""


class BaseLosses(msgspec.Struct, array_like=True):
    """Losses of the hub's model on a device's data, measured before the device trained each update.

    `recent` contains the last `BASE_LOSSES_MAX` finite losses. `before` contains the losses before
    these, at most `BASE_LOSSES_MAX`.
    """

    recent: list[float] = []
    before: list[float] = []

    def observe(self, loss: float | None) -> None:
        """Record an update's loss if it is finite."""
        if loss is None or not math.isfinite(loss):
            return
        if len(self.recent) >= BASE_LOSSES_MAX:
            add_recent(self.before, self.recent[0], BASE_LOSSES_MAX)
        add_recent(self.recent, loss, BASE_LOSSES_MAX)

    @property
    def newest(self) -> float:
        """The median of the last `RECENT` losses; NaN before the first loss."""
        return median(self.recent[-RECENT:]) if self.recent else math.nan

    @property
    def usual(self) -> float:
        """The same as `newest`, but NaN if there are too few losses to judge the device's data."""
        return self.newest if len(self.recent) >= RECENT else math.nan


class DeviceMeasurements(msgspec.Struct, array_like=True):
    """The measurements of one device, which are 0 before its first update.

    - `examples`: number of examples in its data set.
    - `local_steps_max`: the device's own maximum number of local steps, or 0 without a limit.
    - `step_s`: seconds per local step.
    - `communication_s`: seconds of a cycle during which the device neither trained nor waited for a
      fold.
    - `counted`: whether the hub used its last update.
    - `bound`: the bound that prevents its number of local steps from reaching the controller's
      target.
    - `roused`: number of further updates for which the device does not idle.
    - The losses are `None`, and the score is NaN, if its last update did not report them.
    - `updated_s`: core time of its last update, or 0 if it has rejoined since then.
    - `period_s_min`: minimum seconds between two exchanges that its daily quota allows.

    >>> from edgeasync.policies import DeviceMeasurements
    >>> DeviceMeasurements(examples=600, step_s=0.01).step_s
    0.01
    """

    examples: int = 0
    local_steps_max: int = 0
    local_steps: int = 0
    assigned_steps: int = 0
    batch_examples: float = 0.0
    staleness: int = 0
    step_s: float = 0.0
    communication_s: float = 0.0
    examples_per_s: float = 0.0
    loss_mean: float | None = 0.0
    loss_variance: float | None = 0.0
    score: float = math.inf
    updates: int = 0
    counted: bool = False
    why: str = ""
    recent_step_s: list[float] = []
    recent_communication_s: list[float] = []
    bound: str = ""
    base_losses: BaseLosses = msgspec.field(default_factory=BaseLosses)
    updated_s: float = 0.0
    recent_period_s: list[float] = []
    period_s_min: float = 0.0
    roused: int = 0

    def observe_arrival(self, now_s: float) -> None:
        """Record the time since the device's last update."""
        if self.updated_s:
            add_recent(self.recent_period_s, now_s - self.updated_s, RECENT)
        self.updated_s = now_s

    def observe(
        self,
        *,
        local_steps: int,
        examples: int,
        step_s: float,
        loss_mean: float | None,
        loss_variance: float | None,
        score: float | None = None,
        base_loss: float | None = None,
        cycle_s: float | None = None,
        overlap_steps: int = 0,
    ) -> None:
        """Record an update's statistics.

        `cycle_s` is the time from sending the assignment to receiving the update, if known.
        `overlap_steps` is the number of local steps that the device took before the assignment
        arrived.
        """
        # Assume at least a nanosecond, so that a false report cannot drive an average to infinity.
        step_s = max(step_s, 1e-9) if step_s > 0 else 0.0
        self.local_steps = local_steps
        self.batch_examples = examples / local_steps
        self.loss_mean = loss_mean
        self.loss_variance = loss_variance
        told = loss_mean if score is None else score
        if told is None:
            self.score = math.nan
        else:
            self.score = told if math.isfinite(told) else math.inf
        self.base_losses.observe(base_loss)
        self.updates += 1
        if step_s:
            self.step_s = median_of_recent(self.recent_step_s, step_s)
            rate = examples / (local_steps * step_s)
            share = EXAMPLES_RATE_WEIGHT if self.examples_per_s else 1.0
            self.examples_per_s += (rate - self.examples_per_s) * share
        if cycle_s is not None:
            communication_s = max(0.0, cycle_s - (local_steps - overlap_steps) * step_s)
            self.communication_s = median_of_recent(self.recent_communication_s, communication_s)

    @property
    def cycle_s(self) -> float:
        """Seconds between two exchanges with the last assigned local steps, without waits for a fold."""
        return self.communication_s + self.step_s * (self.assigned_steps or self.local_steps)

    @property
    def period_s(self) -> float:
        """The median of the measured times between exchanges, including waits for a fold.

        It is 0 before the second exchange.
        """
        return median(self.recent_period_s) if self.recent_period_s else 0.0

    @property
    def last_loss(self) -> float | None:
        """The finite loss of its last update, or `None`."""
        loss = self.loss_mean
        return loss if self.updates and loss is not None and math.isfinite(loss) else None

    @property
    def communication_share(self) -> float:
        """The share of `cycle_s` that the device spends on communication."""
        return self.communication_s / self.cycle_s if self.cycle_s else 0.0
