"""Events of the device's core: messages, results of its work, and a request to stop."""

import msgspec

from edgeasync.core.device.throttle import ThrottleReadings
from edgeasync.protocol.messages import Assignment, Message


class DeviceReceived(msgspec.Struct, frozen=True, gc=False):
    """A message came from the hub. Its payload is received later, by `InstallModel` or `TakeGraph`."""

    message: Message


class DeviceReceivedMalformed(msgspec.Struct, frozen=True, gc=False):
    """A message arrived that cannot be read."""

    reason: str


class ModelArrived(msgspec.Struct, frozen=True, gc=False):
    """The assigned model's payload is here, and is not used before the delay is over: it waits for `UseModel`."""

    assignment: Assignment


class ModelInstalled(msgspec.Struct, frozen=True, gc=False):
    """The assigned model is in the device's memory, whole and checked; `checksum` is that of the model."""

    assignment: Assignment
    checksum: int | None = None


class InstallFailed(msgspec.Struct, frozen=True, gc=False):
    """The assigned model could not be installed; with `spoilt` the model before it is lost, too."""

    reason: str
    spoilt: bool = False


class GraphHeld(msgspec.Struct, frozen=True, gc=False):
    """The device holds the hub's graph, whole and checked: `fetched`, or kept since an earlier start."""

    fetched: bool


class GraphMissing(msgspec.Struct, frozen=True, gc=False):
    """The device does not hold the hub's graph."""


class GraphBroken(msgspec.Struct, frozen=True, gc=False):
    """The hub's graph arrived damaged."""

    reason: str


class GraphForged(msgspec.Struct, frozen=True, gc=False):
    """A whole graph arrived that is not the one the hub announced."""


class Kept(msgspec.Struct, frozen=True, gc=False):
    """The update with this number may be sent: the disk holds it, or the disk has failed."""

    seq: int


class TransferMoved(msgspec.Struct, frozen=True, gc=False):
    """A piece or credit of the current transfer arrived."""


class Trained(msgspec.Struct, frozen=True, gc=False):
    """The assigned local steps are done.

    The loss's mean and variance, the score, `base_loss`, that of the first step, and `validation_loss`, that after
    the last one, may be infinite or NaN, and are `None` where they are unknown.
    `codec`, `checksum` and `payload_bytes` describe the payload, once the update is coded.
    """

    local_steps: int
    examples: int
    loss_mean: float | None
    loss_variance: float | None
    step_s: float
    score: float | None = None
    codec: str = "identity"
    checksum: int = 0
    payload_bytes: int = 0
    base_loss: float | None = None
    metrics: dict[str, float] | None = None
    validation_loss: float | None = None

    def after(self, earlier: "Trained") -> "Trained":
        """Return this result joined with an `earlier` one; if only one has a loss, that is the loss of both."""
        steps = earlier.local_steps + self.local_steps
        share = self.local_steps / steps
        loss_mean, loss_variance = self._losses_after(earlier, share)
        return msgspec.structs.replace(
            self,
            local_steps=steps,
            examples=earlier.examples + self.examples,
            loss_mean=loss_mean,
            loss_variance=loss_variance,
            step_s=(1.0 - share) * earlier.step_s + share * self.step_s,
            metrics=self._metrics_after(earlier),
        )

    def _metrics_after(self, earlier: "Trained") -> dict[str, float] | None:
        """Return the mean metrics of both, by their examples."""
        if self.metrics is None or earlier.metrics is None:
            return earlier.metrics if self.metrics is None else self.metrics
        share = self.examples / ((self.examples + earlier.examples) or 1)
        both = {
            name: (1.0 - share) * earlier.metrics[name] + share * value
            for name, value in self.metrics.items()
            if name in earlier.metrics
        }
        return self.metrics | both

    def _losses_after(self, earlier: "Trained", share: float) -> tuple[float | None, float | None]:
        """Return mean and variance of both (Chan et al. 1983); `share` is this result's part of the steps."""
        if self.loss_mean is None or self.loss_variance is None:
            return earlier.loss_mean, earlier.loss_variance
        if earlier.loss_mean is None or earlier.loss_variance is None:
            return self.loss_mean, self.loss_variance
        difference = self.loss_mean - earlier.loss_mean
        spread = difference * difference * share * (1.0 - share)
        variance = (1.0 - share) * earlier.loss_variance + share * self.loss_variance + spread
        return earlier.loss_mean + share * difference, variance


class OverlapTrained(msgspec.Struct, frozen=True, gc=False):
    """Steps were taken while the device waited for an assignment; 0 if its trainer has no more."""

    result: Trained


class Connected(msgspec.Struct, frozen=True, gc=False):
    """The hub's machine has accepted the connection; the greetings of both sides are still to come."""


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The shell has noticed that the connection is broken, and is not opening another."""


class DaySpent(msgspec.Struct, frozen=True, gc=False):
    """Hardly anything is left of the device's own limit of a day's bytes."""


class PauseRequested(msgspec.Struct, frozen=True, gc=False):
    """The person who runs the device wants no traffic until `ResumeRequested`; `training` may continue."""

    training: bool


class ResumeRequested(msgspec.Struct, frozen=True, gc=False):
    """The pause is over."""


class DeviceStopRequested(msgspec.Struct, frozen=True):
    """The person who runs the device wants the agent to end."""


GraphEvent = GraphHeld | GraphMissing | GraphBroken | GraphForged
WorkEvent = ModelArrived | ModelInstalled | InstallFailed | GraphEvent | Kept | Trained | OverlapTrained


class Sensed(msgspec.Struct, frozen=True, gc=False):
    """The device's sensors were read."""

    readings: ThrottleReadings


PersonsEvent = PauseRequested | ResumeRequested | DeviceStopRequested
LinkEvent = DeviceReceived | DeviceReceivedMalformed | TransferMoved | Connected | Disconnected
DeviceEvent = LinkEvent | DaySpent | Sensed | PersonsEvent | WorkEvent
