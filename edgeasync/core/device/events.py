"""Events of the device's core: messages, results of work, and requests of users."""

import msgspec

from edgeasync.core.device.throttle import ThrottleReadings
from edgeasync.protocol.messages import Assignment, Message


class DeviceReceived(msgspec.Struct, frozen=True, gc=False):
    """A message from the hub was received.

    Its payload is received later, by `InstallModel` or `TakeGraph`.
    """

    message: Message


class DeviceReceivedMalformed(msgspec.Struct, frozen=True, gc=False):
    """A message was received that cannot be decoded."""

    reason: str


class ModelArrived(msgspec.Struct, frozen=True, gc=False):
    """The payload of the assigned model has arrived, and waits for `UseModel`."""

    assignment: Assignment


class ModelInstalled(msgspec.Struct, frozen=True, gc=False):
    """The assigned model was decoded and verified; `checksum` is the checksum of the model."""

    assignment: Assignment
    checksum: int | None = None


class InstallFailed(msgspec.Struct, frozen=True, gc=False):
    """The assigned model could not be installed; if `spoilt` is set, the old model is lost, too."""

    reason: str
    spoilt: bool = False


class GraphHeld(msgspec.Struct, frozen=True, gc=False):
    """The device has the hub's graph or base; it was `fetched` now, or stored before."""

    fetched: bool


class GraphMissing(msgspec.Struct, frozen=True, gc=False):
    """The device has only the first `stored_bytes` of the hub's graph or base."""

    stored_bytes: int = 0


class GraphLocked(msgspec.Struct, frozen=True, gc=False):
    """Another process of this device is downloading the base."""


class GraphArrived(msgspec.Struct, frozen=True, gc=False):
    """All bytes of the graph or base have arrived. The device still has to verify them."""


class GraphBroken(msgspec.Struct, frozen=True, gc=False):
    """The hub's graph or base arrived damaged, or could not be stored."""

    reason: str


class GraphForged(msgspec.Struct, frozen=True, gc=False):
    """A complete graph or base arrived whose fingerprint differs from the announced one."""


class Kept(msgspec.Struct, frozen=True, gc=False):
    """The update with this number may be sent, because it is on disk or the disk has failed."""

    seq: int


class TransferMoved(msgspec.Struct, frozen=True, gc=False):
    """A piece or a credit of the current transfer was received."""


class Trained(msgspec.Struct, frozen=True, gc=False):
    """The assigned local steps are done.

    The losses may be infinite or NaN, and are `None` if unknown: mean, variance, `score`,
    `base_loss` (loss of the first step) and `validation_loss` (loss after the last step). Once the
    update is encoded, `codec`, `checksum` and `payload_bytes` describe its payload.
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
        """Merge this result with an `earlier` result.

        If only one of them has a loss, keep that loss.
        """
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
        """Return the mean of each metric over both results, weighted by the number of examples."""
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
        """Return the mean and the variance of the losses of both results (Chan et al. 1983).

        `share` is the fraction of the steps that belongs to this result.
        """
        if self.loss_mean is None or self.loss_variance is None:
            return earlier.loss_mean, earlier.loss_variance
        if earlier.loss_mean is None or earlier.loss_variance is None:
            return self.loss_mean, self.loss_variance
        difference = self.loss_mean - earlier.loss_mean
        spread = difference * difference * share * (1.0 - share)
        variance = (1.0 - share) * earlier.loss_variance + share * self.loss_variance + spread
        return earlier.loss_mean + share * difference, variance


class OverlapTrained(msgspec.Struct, frozen=True, gc=False):
    """The device has taken steps while it waited, or 0 steps if its trainer has none left."""

    result: Trained


class Connected(msgspec.Struct, frozen=True, gc=False):
    """The hub's machine has accepted the connection. The handshake has not started yet."""


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The connection was lost, and the shell does not open another one."""


class DaySpent(msgspec.Struct, frozen=True, gc=False):
    """The device's own daily quota is almost exhausted."""


class PauseRequested(msgspec.Struct, frozen=True, gc=False):
    """A user requested to pause all traffic until `ResumeRequested`.

    If `training` is set, training may continue.
    """

    training: bool


class ResumeRequested(msgspec.Struct, frozen=True, gc=False):
    """A user requested to end the pause."""


class DeviceStopRequested(msgspec.Struct, frozen=True):
    """A user requested to end the agent."""


GraphEvent = GraphHeld | GraphMissing | GraphLocked | GraphArrived | GraphBroken | GraphForged
WorkEvent = ModelArrived | ModelInstalled | InstallFailed | GraphEvent | Kept | Trained | OverlapTrained


class Sensed(msgspec.Struct, frozen=True, gc=False):
    """The device's sensors were read."""

    readings: ThrottleReadings


PersonsEvent = PauseRequested | ResumeRequested | DeviceStopRequested
LinkEvent = DeviceReceived | DeviceReceivedMalformed | TransferMoved | Connected | Disconnected
DeviceEvent = LinkEvent | DaySpent | Sensed | PersonsEvent | WorkEvent
