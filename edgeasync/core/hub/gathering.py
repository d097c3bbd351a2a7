"""Buffers updates until a fold is due, and plans the fold. Part of `PolicyEngine`."""

import math
from collections import Counter
from collections.abc import Sequence

from edgeasync.core.hub.divergence import DivergenceGuard
from edgeasync.core.hub.effects import Fold
from edgeasync.core.hub.electorate import Electorate
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.policies_in_force import PoliciesInForce
from edgeasync.core.hub.policy_state import PolicyEngineState
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.measurements.fleet import agreement_of
from edgeasync.measurements.votes import DEVICES_MIN
from edgeasync.policies.aggregation import Contribution, Fleet, Waiting
from edgeasync.policies.policy import folds_one_by_one
from edgeasync.policies.transforms import Conditions, plan_chain

VOTERS_WITH_A_SHARE = 4
"""A voter may buffer at most 1/4 of `updates_held_max`. With fewer than four voters, each may
buffer an equal share.
"""

SLACK_UPDATES = 64
"""The norm limit for a voter's long updates is initially the peak norm. It halves after this number
of long updates.
"""


class Gathering:
    """Buffers updates, and determines their weights in a fold. Handles scalars only.

    Every voter has one vote, and the norms of updates are clipped to the usual norm.
    """

    def __init__(
        self,
        in_force: PoliciesInForce,
        electorate: Electorate,
        divergence: DivergenceGuard,
        settings: HubCoreSettings,
        state: PolicyEngineState,
    ) -> None:
        self._policy = in_force.policy
        self._in_force = in_force
        self._divergence = divergence
        self._electorate = electorate
        self._members = electorate.members
        self._settings = settings
        self.load_state(state)

    def load_state(self, state: PolicyEngineState) -> None:
        """Resume from a durable state."""
        self.state = state
        self._waiting = Waiting(state.gathering.contributions)

    # -- buffered updates ------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of buffered updates."""
        return len(self.state.gathering.contributions)

    def count_of(self, device_id: str) -> int:
        """Return the number of a device's buffered updates."""
        if device_id not in self._waiting.of_device:
            return 0
        return sum(one.device_id == device_id for one in self.state.gathering.contributions)

    def is_crowding(self, voter: str) -> bool:
        """Return whether a voter has already buffered its full share of updates.

        Without this limit, one voter could fill the buffer, and trigger a fold of its updates
        alone.
        """
        places = self._settings.limits.updates_held_max
        waiting = self._waiting.of_voter.get(voter, 0)
        if VOTERS_WITH_A_SHARE * waiting < places:
            return False
        share = math.ceil(places / max(1, min(VOTERS_WITH_A_SHARE, len(self._members.voters))))
        return share <= waiting and share < places

    def add(self, contribution: Contribution) -> None:
        """Buffer an update."""
        self._waiting.append(contribution)

    def take(self) -> list[Contribution]:
        """Remove and return all buffered updates."""
        gathering = self.state.gathering
        taken, gathering.contributions = gathering.contributions, []
        self._waiting = Waiting(gathering.contributions)
        return taken

    def drop(self, device_id: str) -> list[int]:
        """Drop a device's buffered updates; return their handles."""
        gathering = self.state.gathering
        dropped = [one.handle for one in gathering.contributions if one.device_id == device_id]
        gathering.contributions = [one for one in gathering.contributions if one.device_id != device_id]
        self._waiting = Waiting(gathering.contributions)
        return dropped

    def due_s(self, now_s: float = math.inf) -> float | None:
        """Return when the fold is due.

        Return `now_s` if the buffer is full, and `None` if the time is unknown.
        """
        count = len(self.state.gathering.contributions)
        if not count:
            return None
        if count >= self._settings.limits.updates_held_max:
            return now_s
        return self._in_force.aggregate.flush_at_s(self._waiting, self._electorate.fleet(self._waiting))

    def rolled_back(self) -> None:
        """Restart the count of folds at 0."""
        gathering = self.state.gathering
        gathering.measuring.clear()
        gathering.folds_before += gathering.folds
        gathering.folds = 0

    # -- a fold ----------------------------------------------------------------------------------------------

    def fold(self, learning_rate_factor: float) -> tuple[list[Contribution], Fold]:
        """Plan the fold of all buffered updates, and count the updates for their members."""
        state = self.state
        gathering, electorate, combine = state.gathering, state.electorate, self._policy.combine
        contributions = self.take()
        fleet = self._electorate.fleet()
        shares, rows = self._shares(contributions, fleet)
        clips = self._clips(contributions)
        handles: list[int] = []
        weights: list[float] = []
        norms: list[float] = []
        lengths: list[float] = []
        for one, share, clip in zip(contributions, shares, clips, strict=True):
            weight = share * clip
            handles.append(one.handle)
            weights.append(weight)
            norms.append(one.norm)
            lengths.append(abs(weight) * one.norm)
            if (member := self._members.members.get(one.device_id)) is not None:
                member.count_folded(share, clip)
                self._members.note_change(member)
        count = len(contributions)
        voters = 1 if count == 1 else len({one.voter for one in contributions})
        conditions = Conditions(
            math.fsum(lengths),
            gathering.folds,
            state.fleet.staleness_mean,
            gathering.folds_before,
            state.fleet.extrapolation(voters),
            int(fleet.voters_live),
        )
        gathering.folds += 1
        # An infrequent device's update is old. Whether it agrees with others says nothing about the
        # exchange period.
        infrequent = electorate.infrequent and any(one.device_id in electorate.infrequent for one in contributions)
        measure = count > 1 and not combine.robust and not infrequent
        if measure:
            gathering.measuring[state.version + 1] = (norms, weights)
        return contributions, Fold(
            number=state.version + 1,
            handles=tuple(handles),
            weights=tuple(weights),
            plan=plan_chain(self._policy.optimizer, conditions),
            scale=learning_rate_factor,
            measure=measure,
            rows=rows,
            norm_usual=self._norm_usual if combine.centred else math.inf,
        )

    def observe_sum(self, number: int, norm: float) -> None:
        """Record the norm of a fold's weighted sum, which shows how well its updates agree."""
        norms, weights = self.state.gathering.measuring.pop(number, ([], []))
        agreement = agreement_of(norm, norms, weights)
        if agreement is not None:
            self.state.fleet.observe_agreement(agreement)

    def _shares(
        self, contributions: Sequence[Contribution], fleet: Fleet
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return the updates' weights before clipping, and their rows for a robust combiner."""
        weights = self._in_force.aggregate.weights(contributions, fleet)
        if self._policy.take == "best":
            weights = _only_best(contributions, weights, self.state.fleet.scores.least_credible)
        weights, rows = self._one_vote_each(contributions, weights)
        if self.state.rest.resting:
            voters = self._share_of_voters(contributions)
            weights = tuple([weight * voters for weight in weights])
        return weights, rows

    def _one_vote_each(
        self, contributions: Sequence[Contribution], weights: tuple[float, ...]
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return weights with one vote per voter, and the rows for a robust combiner.

        Updates of one voter share a row. If no rows are returned, each update has its own row. If
        updates are folded one by one, a voter's vote is divided among its devices, and each update
        is weighted with its device's share.
        """
        if folds_one_by_one(self._in_force.aggregate):
            shared = self._members.shared
            if not shared:
                return weights, ()
            votes = [1.0 / shared.get(one.voter, 1) for one in contributions]
            return tuple([weight * vote for weight, vote in zip(weights, votes, strict=True)]), ()
        if not self._policy.combine.robust:
            return weights, ()
        updates = Counter(one.voter for one in contributions)
        if len(updates) == len(contributions):
            return weights, ()
        row_of = {voter: row for row, voter in enumerate(updates)}
        weights = tuple([one.weight / (len(updates) * updates[one.voter]) for one in contributions])
        return weights, tuple([row_of[one.voter] for one in contributions])

    def _share_of_voters(self, contributions: Sequence[Contribution]) -> float:
        """Return the fraction of all votes that belongs to these updates.

        Return 1 if updates are folded one by one. In an idle fleet, a fold may contain the updates
        of only a few devices. With this fraction, each of them weighs as much as in a fold of the
        whole fleet. Otherwise, a device that exchanges alone would replace the model with its own.
        """
        if folds_one_by_one(self._in_force.aggregate):
            return 1.0
        shared = self._members.shared
        devices = dict.fromkeys([(one.device_id, one.voter) for one in contributions])  # ordered, unlike a set
        votes = sum(1.0 / shared.get(voter, 1) for _, voter in devices)
        return min(1.0, votes / max(1, self._electorate.voters_live))

    def _clips(self, contributions: Sequence[Contribution]) -> list[float]:
        """Return the factor by which each update is clipped.

        Also record the devices whose update is not clipped.
        """
        fleet, monitor, divergence = self.state.fleet, self._policy.monitor, self._divergence
        centred = self._policy.combine.centred
        # A combiner with a centre clips each update itself, by its distance from the centre.
        bound = math.inf if centred else monitor.norm_max(fleet)
        if (self._norm_usual if centred else bound) == math.inf:
            for one in contributions:
                divergence.note_unbounded(one.device_id)
        clips = []
        for one in contributions:
            norm_max = bound
            if one.norm > bound and (member := self._members.members.get(one.device_id)) is not None:
                norm_max = monitor.norm_max(fleet, self._slack(member))
                member.updates_long += 1
            norm = one.norm
            if divergence.is_on_probation(one.voter):
                usual = fleet.lengths.usual()
                norm_max = min(norm_max, monitor.probation * usual)
                norm = min(norm, usual) if centred else norm  # a combiner with a centre clips the rest
            clips.append(1.0 if norm <= norm_max else norm_max / norm)
        return clips

    def _slack(self, member: Member) -> float:
        """Return the maximum norm of a voter's update as a fraction of the peak norm, initially 1.

        A device with unfamiliar data sends long updates at first, and shorter ones as the model
        learns from them. The updates of a hostile device stay long, so its limit falls.
        """
        return math.pow(0.5, self._members.long_updates_of_voter(member) / SLACK_UPDATES)

    @property
    def _norm_usual(self) -> float:
        """The median norm of the voters' updates; infinity while too few norms are known."""
        lengths = self.state.fleet.lengths
        return lengths.median if len(lengths) >= DEVICES_MIN and lengths.median > 0.0 else math.inf

    def check(self) -> None:
        """Raise `AssertionError` if the counts are inconsistent."""
        gathering = self.state.gathering
        assert len(gathering.contributions) < self._settings.limits.updates_held_max
        self._waiting.check(gathering.contributions, self._electorate.fleet())
        assert len(gathering.measuring) <= self.state.version


def _only_best(contributions: Sequence[Contribution], weights: Sequence[float], least: float) -> tuple[float, ...]:
    """Move all weight to the update with the lowest score.

    Scores below `least` are ignored. If no update has a valid score, return the weights unchanged.
    """
    scored = [position for position, one in enumerate(contributions) if one.score >= least]
    if not scored:
        return tuple(weights)
    best = min(scored, key=lambda position: contributions[position].score)
    total = math.fsum(weights)
    return tuple(total if position == best else 0.0 for position in range(len(contributions)))
