"""The plan of a round for one member: which segment it sends to which member at which step."""

from typing import Literal, NamedTuple

from edgeasync.protocol.peer_messages import Topology

Source = Literal["sum", "snapshot", "mean", "forward"]
Way = Literal["add", "replace"]


class OutgoingStep(NamedTuple):
    """A payload to send. It is encoded after the payload of step `after` was decoded.

    If the source is `"forward"`, the payload is the one that was received at that step.
    """

    step: int
    receivers: tuple[str, ...]
    segment: int
    source: Source
    after: int | None


class IncomingStep(NamedTuple):
    """A payload to receive. It is decoded after the payload of step `after` was decoded.

    A payload with `own` set is the member's own, and is not received. A payload is the sum of
    `models` models, or a mean, which counts as one model.
    """

    step: int
    sender: str
    segment: int
    way: Way
    after: int | None = None
    own: bool = False
    models: int = 1


class RoundPlan(NamedTuple):
    """The part of one member in a round.

    If `in_order` is set, every step waits for the previous step, around the whole ring.
    """

    segments: int
    outgoing: tuple[OutgoingStep, ...]
    incoming: tuple[IncomingStep, ...]
    in_order: bool


def plan_round(topology: Topology, members: tuple[str, ...], name: str) -> RoundPlan:
    """Return the part that the member `name` has in a round of these members."""
    position = members.index(name)
    return _plan_ring(members, position) if topology == "ring" else _plan_all_to_all(members, position)


def _plan_ring(members: tuple[str, ...], position: int) -> RoundPlan:
    """Plan a ring all-reduce.

    In the first n - 1 steps, the members add up the segments. In the other n - 1 steps, they
    forward the means.
    """
    count = len(members)
    following, before = members[(position + 1) % count], members[position - 1]
    outgoing, incoming = [], []
    for step in range(2 * (count - 1)):
        growing = step < count - 1
        source: Source = "sum" if growing else "mean" if step == count - 1 else "forward"
        way: Way = "add" if growing else "replace"
        segment = (position - step) % count
        outgoing.append(OutgoingStep(step, (following,), segment, source, step - 1 if step else None))
        incoming.append(IncomingStep(step, before, (segment - 1) % count, way, models=step + 1 if growing else 1))
    return RoundPlan(count, tuple(outgoing), tuple(incoming), in_order=True)


def _plan_all_to_all(members: tuple[str, ...], position: int) -> RoundPlan:
    """Plan an all-to-all exchange, in which each member sends its snapshot to all others.

    A member sends at the step that equals its position in the list. All members decode in the order
    of the list, so that all sums are rounded equally.
    """
    others = members[:position] + members[position + 1 :]
    incoming = [
        IncomingStep(step, sender, 0, "add", step - 1 if step else None, own=step == position)
        for step, sender in enumerate(members)
    ]
    outgoing = OutgoingStep(position, others, 0, "snapshot", None)
    return RoundPlan(1, (outgoing,), tuple(incoming), in_order=False)
