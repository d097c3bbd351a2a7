"""What happens to a device core: messages, the outcome of work, a stop."""

import msgspec

from edgeasync.protocol.messages import Assignment, Message


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message came from the hub. Its payload is received later, by `InstallModel` or `TakeGraph`."""

    message: Message


class Malformed(msgspec.Struct, frozen=True, gc=False):
    """A message came that is not of the protocol, or of another version of it."""

    reason: str


class ModelInstalled(msgspec.Struct, frozen=True, gc=False):
    """The assigned model is in the device's memory, whole and checked."""

    assignment: Assignment


class InstallFailed(msgspec.Struct, frozen=True, gc=False):
    """The assigned model could not be installed; `spoilt` says that the one before it is lost, too."""

    reason: str
    spoilt: bool = False


class GraphHeld(msgspec.Struct, frozen=True, gc=False):
    """The device holds the hub's graph, whole and with its fingerprint; `fetched` or found where it was kept."""

    fetched: bool


class GraphMissing(msgspec.Struct, frozen=True, gc=False):
    """The device does not hold the hub's graph."""


class GraphBroken(msgspec.Struct, frozen=True, gc=False):
    """The hub's graph came in broken."""

    reason: str


class GraphForged(msgspec.Struct, frozen=True, gc=False):
    """A whole graph came in that is not the one the hub announced."""


class Kept(msgspec.Struct, frozen=True, gc=False):
    """The update of this number would outlive a power cut, or cannot be kept: it may leave."""

    seq: int


class TransferMoved(msgspec.Struct, frozen=True, gc=False):
    """A piece or credit of the current transfer came in."""


class Trained(msgspec.Struct, frozen=True, gc=False):
    """The assigned local steps are done.

    The loss's mean and variance, and the score, may be infinite or NaN; all three are `None` where none is known.
    `codec`, `checksum` and `payload_bytes` are of the payload, once the update is coded.
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

    def after(self, earlier: "Trained") -> "Trained":
        """Return both as one; the loss is that of one of them where the other knows none."""
        steps = earlier.local_steps + self.local_steps
        share = self.local_steps / steps
        loss_mean, loss_variance = self._losses_after(earlier, share)
        return Trained(
            local_steps=steps,
            examples=earlier.examples + self.examples,
            loss_mean=loss_mean,
            loss_variance=loss_variance,
            step_s=(1.0 - share) * earlier.step_s + share * self.step_s,
            score=self.score,
            codec=self.codec,
            checksum=self.checksum,
            payload_bytes=self.payload_bytes,
        )

    def _losses_after(self, earlier: "Trained", share: float) -> tuple[float | None, float | None]:
        """Return mean and variance of both, `share` of the steps being these; as Chan et al. 1983 join two."""
        if self.loss_mean is None or self.loss_variance is None:
            return earlier.loss_mean, earlier.loss_variance
        if earlier.loss_mean is None or earlier.loss_variance is None:
            return self.loss_mean, self.loss_variance
        difference = self.loss_mean - earlier.loss_mean
        spread = difference * difference * share * (1.0 - share)
        variance = (1.0 - share) * earlier.loss_variance + share * self.loss_variance + spread
        return earlier.loss_mean + share * difference, variance


class OverlapTrained(msgspec.Struct, frozen=True, gc=False):
    """At least one step was taken while the device waited for an assignment."""

    result: Trained


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The connection has broken, as the shell can tell, and no other is being opened."""


class StopRequested(msgspec.Struct, frozen=True):
    """The person who runs the device wants the agent to end."""


GraphEvent = GraphHeld | GraphMissing | GraphBroken | GraphForged
WorkEvent = ModelInstalled | InstallFailed | GraphEvent | Kept | Trained | OverlapTrained
DeviceEvent = Received | Malformed | TransferMoved | Disconnected | StopRequested | WorkEvent
