"""Aggregators decide when buffered updates become the next version, and how they are weighted."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Protocol, overload, runtime_checkable

import msgspec
from msgspec import Meta

from edgeasync.config import Section

UpdateKind = Literal["delta", "model"]
Answer = Literal["now", "at_flush"]


NEARLY = 1e-9
"""Tolerance for rounding errors in sums of vote shares."""

PERIOD_S = 10.0
"""The period in seconds that `patience` assumes until the hub has measured the fleet's period."""


class Contribution(msgspec.Struct, frozen=True, gc=False):
    """An accepted update that waits in the buffer; `handle` identifies its payload.

    It contains scalars only. `weight` is the staleness weight. `examples` is the size of the
    device's data set or, if the device does not report it, the number of examples that the update
    was trained on. `score` is the device's loss: lower is better, and NaN means that there is no
    score. `voter` is the device's key or, without keys, its id.

    >>> from edgeasync.policies import Contribution
    >>> one = Contribution(0, "pi", 0.5, 1.2, 600, 16, 1, 0.3, 12.5, "pi")
    >>> one.weight, one.examples
    (0.5, 600)
    """

    handle: int
    device_id: str
    weight: float
    norm: float
    examples: int
    local_steps: int
    staleness: int
    score: float
    arrived_s: float
    voter: str


class Fleet(msgspec.Struct, frozen=True, gc=False):
    """What an aggregator knows about the live devices.

    A voter is a key or, without keys, a device. `voters_live` is the number of voters with at least
    one live device. If a key has several live devices, `names` maps it to their number, and each of
    these devices has an equal share of the key's vote. `period_s` is the usual time between two
    exchanges of a device; it is 0 until it has been measured. `infrequent` maps each live device
    that exchanges far less often to its vote.

    >>> from edgeasync.policies import Fleet
    >>> Fleet(voters_live=3.0, period_s=2.0).vote("pi")
    1.0
    """

    voters_live: float
    period_s: float = 0.0
    names: Mapping[str, int] = {}
    infrequent: Mapping[str, float] = {}

    def vote(self, voter: str) -> float:
        """Return a device's share of its key's vote."""
        return 1.0 / self.names.get(voter, 1)


class Ballot:
    """The first update of each device in the buffer, in order, with the running sum of votes.

    Infrequent devices count only if `all_devices` is true. Do not modify the fleet's mappings after
    you have created the ballot.
    """

    def __init__(self, fleet: Fleet, *, all_devices: bool) -> None:
        self.fleet = fleet
        self.votes_without = 0.0 if all_devices else math.fsum(fleet.infrequent.values())
        """Total votes of the infrequent devices if this ballot does not count them, otherwise 0."""
        self.first: list[Contribution] = []
        """The first update of each device."""
        self.votes: list[float] = []
        self._all_devices = all_devices
        self._counted = 0
        self._devices: set[str] = set()
        self._of_voter: dict[str, float] = {}

    def count(self, updates: list[Contribution]) -> None:
        """Count the updates that were appended to the buffer since the last call."""
        total = self.votes[-1] if self.votes else 0.0
        without: Mapping[str, float] = {} if self._all_devices else self.fleet.infrequent
        for one in updates[self._counted :]:
            if one.device_id in self._devices or one.device_id in without:
                continue
            self._devices.add(one.device_id)
            before = self._of_voter.get(one.voter, 0.0)
            self._of_voter[one.voter] = after = min(1.0, before + self.fleet.vote(one.voter))
            total += after - before
            self.first.append(one)
            self.votes.append(total)
        self._counted = len(updates)

    def holds(self, fleet: Fleet) -> bool:
        """Return whether this ballot is also valid for `fleet`."""
        return self.fleet.names is fleet.names and (self._all_devices or self.fleet.infrequent is fleet.infrequent)

    def reached_s(self, needed: float) -> float | None:
        """Return when the total reached `needed` votes, or `None` if it has not.

        That is the arrival time of the update with the last vote needed. At least one update is
        required, even if `needed` is 0.
        """
        position = bisect_left(self.votes, needed - NEARLY)
        return self.first[position].arrived_s if position < len(self.first) else None


class Waiting(Sequence[Contribution]):
    """Buffered updates in order of arrival, and counts that `append` keeps current.

    `append` also appends to the list that was passed to the constructor. If you change that list in
    any other way, create a new `Waiting`.
    """

    def __init__(self, updates: list[Contribution]) -> None:
        self._updates = updates
        self._ballots: dict[bool, Ballot] = {}
        self.of_voter: dict[str, int] = {}
        """The number of buffered updates per voter."""
        self.of_device: dict[str, Contribution] = {}
        """The first update of each device."""
        for one in updates:
            self._count(one)

    @staticmethod
    def of(updates: Sequence[Contribution]) -> "Waiting":
        """Return `updates` itself if it is already a `Waiting`, otherwise a new one."""
        return updates if isinstance(updates, Waiting) else Waiting(list(updates))

    def __len__(self) -> int:
        return len(self._updates)

    @overload
    def __getitem__(self, place: int) -> Contribution: ...
    @overload
    def __getitem__(self, place: slice) -> list[Contribution]: ...
    def __getitem__(self, place: int | slice) -> Contribution | list[Contribution]:
        return self._updates[place]

    def append(self, one: Contribution) -> None:
        """Append an update."""
        self._updates.append(one)
        self._count(one)

    def _count(self, one: Contribution) -> None:
        self.of_voter[one.voter] = self.of_voter.get(one.voter, 0) + 1
        self.of_device.setdefault(one.device_id, one)

    def ballot(self, fleet: Fleet, *, all_devices: bool = True) -> Ballot:
        """Return the ballot for a fleet.

        Votes are recounted only if `names` or `infrequent` of the fleet changed since the last
        call.
        """
        found = self._ballots.get(all_devices)
        if found is None or not found.holds(fleet):
            found = self._ballots[all_devices] = Ballot(fleet, all_devices=all_devices)
        found.count(self._updates)
        return found

    def check(self, updates: list[Contribution], fleet: Fleet) -> None:
        """Raise `AssertionError` unless the counts equal those of a new `Waiting`."""
        again = Waiting(updates)
        assert self._counts(fleet) == again._counts(fleet)

    def _counts(self, fleet: Fleet) -> object:
        ballots = [self.ballot(fleet, all_devices=all_devices) for all_devices in (True, False)]
        first = [[one.handle for one in ballot.first] for ballot in ballots]
        votes = [(ballot.votes, ballot.votes_without) for ballot in ballots]
        return self.of_voter, [(name, one.handle) for name, one in self.of_device.items()], first, votes


@runtime_checkable
class Aggregator(Protocol):
    """Decides when buffered updates become a version, and how they are weighted.

    The hub buffers contributions in order of arrival. After each of them, it calls `flush_at_s`,
    whose result is the time of the next fold. At that time, the hub folds all buffered updates,
    each multiplied by its factor from `weights`. The results of both methods must depend only on
    the arguments, so that a replay makes the same decisions.

    >>> from typing import ClassVar
    >>> from edgeasync import Policy
    >>> from edgeasync.policies import Plugin
    >>> class Pairs(Plugin, frozen=True):
    ...     update: ClassVar[str] = "delta"
    ...     answer: ClassVar[str] = "now"
    ...     def flush_at_s(self, buffered, fleet):
    ...         return buffered[-1].arrived_s if len(buffered) >= 2 else None
    ...     def weights(self, buffered, fleet):
    ...         return [one.weight / len(buffered) for one in buffered]
    >>> policy = Policy(aggregate=Pairs())
    """

    update: ClassVar[UpdateKind]
    """What devices send: the difference from their assigned model, or their whole model."""

    answer: ClassVar[Answer]
    """When a device gets its next assignment: at once, or when its update is folded."""

    def flush_at_s(self, buffered: Sequence[Contribution], fleet: Fleet) -> float | None:
        """Return the core time at which to fold `buffered`, or `None`. `buffered` is never empty."""

    def weights(self, buffered: Sequence[Contribution], fleet: Fleet) -> tuple[float, ...]:
        """Return each contribution's factor in the sum that becomes the pseudo-gradient."""


class ImmediateAggregator(Section, frozen=True, tag_field="kind", tag="immediate"):
    """Asynchronous SGD: fold every update on arrival, multiplied by its staleness weight."""

    paper: ClassVar[str] = "Dean et al. 2012 (NIPS, Downpour SGD)"
    update: ClassVar[UpdateKind] = "delta"
    answer: ClassVar[Answer] = "now"

    def flush_at_s(self, buffered: Sequence[Contribution], fleet: Fleet) -> float | None:  # noqa: ARG002
        """Return the arrival time of the oldest update, so that a fold is always due."""
        return buffered[0].arrived_s

    def weights(self, buffered: Sequence[Contribution], fleet: Fleet) -> tuple[float, ...]:  # noqa: ARG002
        """Return the staleness weights unchanged."""
        return tuple([contribution.weight for contribution in buffered])


class ModelAverageAggregator(Section, frozen=True, tag_field="kind", tag="model_average"):
    """Mix each device's model into the hub's model when it arrives.

    The result is `x = (1 - a) x + a x_i`, where `a` is `rate` times the staleness weight.
    """

    paper: ClassVar[str] = "FedAsync, Xie et al. 2019 (arXiv:1903.03934)"
    update: ClassVar[UpdateKind] = "model"
    answer: ClassVar[Answer] = "now"

    rate: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.6
    """Mixing weight of a model with staleness 0."""

    def flush_at_s(self, buffered: Sequence[Contribution], fleet: Fleet) -> float | None:  # noqa: ARG002
        """Return the arrival time of the oldest update, so that a fold is always due."""
        return buffered[0].arrived_s

    def weights(self, buffered: Sequence[Contribution], fleet: Fleet) -> tuple[float, ...]:  # noqa: ARG002
        """Return the mixing weights divided by the number of models, so that models are averaged."""
        return tuple([self.rate * contribution.weight / len(buffered) for contribution in buffered])


class MeanAggregator(Section, frozen=True):
    """Base class of aggregators that buffer updates and fold their weighted mean.

    An update's factor is its staleness weight times its share among the updates folded together.
    With `weigh_by = "devices"`, all shares are equal, and devices with the same key split one
    share. As in FedBuff, a stale update makes the step shorter, because the weight that it loses is
    not redistributed to the other updates.
    """

    update: ClassVar[UpdateKind] = "delta"

    weigh_by: Literal["devices", "examples"] = "devices"
    """Share of each update: equal for all, or proportional to the size of the device's data."""

    def weights(self, buffered: Sequence[Contribution], fleet: Fleet) -> tuple[float, ...]:  # noqa: ARG002
        """Return each update's staleness weight multiplied by its share."""
        devices = Counter([voter for voter, _ in {(one.voter, one.device_id) for one in buffered}])
        shares = []
        for contribution in buffered:
            share = float(contribution.examples) if self.weigh_by == "examples" else 1.0
            shares.append(share / devices[contribution.voter])
        total = math.fsum(shares)
        if total <= 0.0:  # no device reported its number of examples
            shares, total = [1.0] * len(buffered), float(len(buffered))
        return tuple([one.weight * share / total for one, share in zip(buffered, shares, strict=True)])


class BufferedAggregator(MeanAggregator, frozen=True, tag_field="kind", tag="buffered"):
    """Fold the mean of every `count` updates. Devices never wait for a fold."""

    paper: ClassVar[str] = "FedBuff, Nguyen et al. 2022 (arXiv:2106.06639)"
    answer: ClassVar[Answer] = "now"

    count: Annotated[int, Meta(ge=1, le=10_000)] = 5
    """Number of updates per version; at most `limits.updates_held_max`."""
    wait_s_max: float | None = None
    """Maximum seconds that a buffered update waits; must be over 0. After this time, the hub folds
    the buffered updates even if there are fewer than `count`. Without this key, the hub always
    waits for `count` updates.
    """

    def __post_init__(self) -> None:
        _check_seconds("wait_s_max", self.wait_s_max)

    def flush_at_s(self, buffered: Sequence[Contribution], fleet: Fleet) -> float | None:  # noqa: ARG002
        """Return when update number `count` arrived, or when the first update's wait ends."""
        if len(buffered) >= self.count:
            return buffered[self.count - 1].arrived_s
        return None if self.wait_s_max is None else buffered[0].arrived_s + self.wait_s_max


class QuorumAggregator(MeanAggregator, frozen=True, tag_field="kind", tag="quorum"):
    """Fold when all live devices have pushed, or shortly after a quorum of them has pushed.

    Devices that have pushed wait for the fold. Slow devices do not delay it: an update that arrives
    after the fold counts as a stale update in the next version. The hub does not wait for
    infrequent devices once all other devices have pushed. Times are in periods, where one period is
    the usual time between two exchanges of a device.
    """

    paper: ClassVar[str] = "backup workers, Chen et al. 2016 (arXiv:1604.00981)"
    answer: ClassVar[Answer] = "at_flush"

    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.6
    """Share of the live devices, rounded up, that forms a quorum. The larger the share, the more
    often the hub waits for slow devices.
    """
    grace: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.1
    """Number of periods that the hub waits for the remaining devices once a quorum has pushed."""
    patience: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    """Maximum number of periods from the first update to the fold, even if there is no quorum by
    then.
    """

    def flush_at_s(self, buffered: Sequence[Contribution], fleet: Fleet) -> float | None:
        """Return when the last live device's update arrived, or when `grace` or `patience` ends."""
        waiting = Waiting.of(buffered)
        due_s = buffered[0].arrived_s + self.patience * (fleet.period_s or PERIOD_S)
        quorum = self.share * fleet.voters_live
        if len(buffered) >= quorum - NEARLY:  # each update adds at most one vote
            ballot = waiting.ballot(fleet)
            if ballot.reached_s(fleet.voters_live) is not None:
                return ballot.first[-1].arrived_s
            quorum_s = ballot.reached_s(quorum)
            if quorum_s is not None:
                due_s = min(due_s, quorum_s + self.grace * fleet.period_s)
        if fleet.infrequent:
            ballot = waiting.ballot(fleet, all_devices=False)
            all_s = ballot.reached_s(fleet.voters_live - ballot.votes_without)
            due_s = due_s if all_s is None else min(due_s, all_s)
        return due_s


class SynchronousAggregator(MeanAggregator, frozen=True, tag_field="kind", tag="synchronous"):
    """Train in rounds, which end when a `share` of the live devices have pushed, or at a deadline.

    Every device that has pushed waits for the fold. With a `share` under 1 (over-selection), set
    `staleness = { kind = "constant", staleness_max = 0 }` to reject updates that arrive after the
    end of their round.
    """

    paper: ClassVar[str] = (
        "FedAvg, McMahan et al. 2017 (arXiv:1602.05629); Bonawitz et al. 2019 (arXiv:1902.01046)"
    )
    answer: ClassVar[Answer] = "at_flush"

    share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Share of the live devices that a round waits for, rounded up."""
    deadline_s: float | None = None
    """Maximum seconds from a round's first update to the end of the round; must be over 0. Without
    this key, a round waits for an offline device until the device's lease expires.
    """

    def __post_init__(self) -> None:
        _check_seconds("deadline_s", self.deadline_s)

    def flush_at_s(self, buffered: Sequence[Contribution], fleet: Fleet) -> float | None:
        """Return when the last update that the round waits for arrived, or the round's deadline."""
        needed = self.share * fleet.voters_live
        enough = len(buffered) >= needed - NEARLY  # each update adds at most one vote
        if enough and (reached_s := Waiting.of(buffered).ballot(fleet).reached_s(needed)) is not None:
            return reached_s
        return None if self.deadline_s is None else buffered[0].arrived_s + self.deadline_s


def _check_seconds(name: str, seconds: float | None) -> None:
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise ValueError(f"{name} is {seconds:g}; set a number of seconds over 0, or remove {name}")
