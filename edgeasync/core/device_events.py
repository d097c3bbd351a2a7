"""What happens to a device core: messages, the outcome of work, a stop."""

import msgspec

from edgeasync.protocol.messages import Assignment, Message


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A message came from the hub; a payload is taken in later, by `Adopt` or `TakeGraph`."""

    message: Message


class Unreadable(msgspec.Struct, frozen=True, gc=False):
    """A message came that is not of the protocol, or of another version of it."""

    reason: str


class Adopted(msgspec.Struct, frozen=True, gc=False):
    """The assigned model is in the device's memory, whole and checked."""

    assignment: Assignment


class AdoptionFailed(msgspec.Struct, frozen=True, gc=False):
    """The assigned model came in broken; `spoilt` says that the one held before is lost, too."""

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
    """A piece or credit of the transfer under way came in."""


class Trained(msgspec.Struct, frozen=True, gc=False):
    """The assigned local steps are done. The loss's mean and variance, and the score, may be infinite or NaN."""

    local_steps: int
    examples: int
    loss_mean: float
    loss_variance: float
    step_s: float
    score: float | None = None

    def after(self, earlier: "Trained") -> "Trained":
        """Return what both make together; the losses' variance as Chan et al. 1983 join two."""
        steps = earlier.local_steps + self.local_steps
        share = self.local_steps / steps
        difference = self.loss_mean - earlier.loss_mean
        spread = difference * difference * share * (1.0 - share)
        return Trained(
            local_steps=steps,
            examples=earlier.examples + self.examples,
            loss_mean=earlier.loss_mean + share * difference,
            loss_variance=(1.0 - share) * earlier.loss_variance + share * self.loss_variance + spread,
            step_s=(1.0 - share) * earlier.step_s + share * self.step_s,
            score=self.score,
        )


class TrainedAhead(msgspec.Struct, frozen=True, gc=False):
    """Steps were taken while an assignment was waited for: at least one."""

    result: Trained


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The connection has broken, as the shell can tell; no other is under way."""


class StopRequested(msgspec.Struct, frozen=True):
    """The person who runs the device wants the agent to end."""


GraphEvent = GraphHeld | GraphMissing | GraphBroken | GraphForged
DeviceEvent = (
    Arrived
    | Unreadable
    | Adopted
    | AdoptionFailed
    | GraphEvent
    | Kept
    | TransferMoved
    | Trained
    | TrainedAhead
    | Disconnected
    | StopRequested
)
