"""Gathers updates until they are due, and plans their fold. Part of `PolicyEngine`; scalars only."""

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
"""One voter's waiting updates take at most a fourth of the places; with fewer voters an equal share."""

SLACK_UPDATES = 64
"""A voter's first long update may be as long as was ever usual; half as long after this number of them."""


class Gathering:
    """Holds the updates that wait; weighs them against one another when they are folded.

    Every voter has one vote, and no update counts with more than the usual length.
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

    # -- who waits -------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many updates wait to be folded."""
        return len(self.state.gathering.contributions)

    def count_of(self, device_id: str) -> int:
        """Return how many of a device's updates wait to be folded."""
        if device_id not in self._waiting.of_device:
            return 0
        return sum(one.device_id == device_id for one in self.state.gathering.contributions)

    def is_crowding(self, voter: str) -> bool:
        """Whether as many updates of a voter wait as may: the others must find places, or it would fold alone."""
        places = self._settings.limits.updates_held_max
        waiting = self._waiting.of_voter.get(voter, 0)
        if VOTERS_WITH_A_SHARE * waiting < places:
            return False
        share = math.ceil(places / max(1, min(VOTERS_WITH_A_SHARE, len(self._members.voters))))
        return share <= waiting and share < places

    def add(self, contribution: Contribution) -> None:
        """Let an update wait."""
        self._waiting.append(contribution)

    def take(self) -> list[Contribution]:
        """Return the updates that waited: no update waits after that."""
        gathering = self.state.gathering
        taken, gathering.contributions = gathering.contributions, []
        self._waiting = Waiting(gathering.contributions)
        return taken

    def drop(self, device_id: str) -> list[int]:
        """Drop the updates of a device that wait; return their handles."""
        gathering = self.state.gathering
        dropped = [one.handle for one in gathering.contributions if one.device_id == device_id]
        gathering.contributions = [one for one in gathering.contributions if one.device_id != device_id]
        self._waiting = Waiting(gathering.contributions)
        return dropped

    def due_s(self, now_s: float = math.inf) -> float | None:
        """Return when the updates that wait are due: `now_s` if no more may wait, `None` if that is unknown."""
        count = len(self.state.gathering.contributions)
        if not count:
            return None
        if count >= self._settings.limits.updates_held_max:
            return now_s
        return self._in_force.aggregate.flush_at_s(self._waiting, self._electorate.fleet(self._waiting))

    def rolled_back(self) -> None:
        """Count folds from 0 again."""
        gathering = self.state.gathering
        gathering.measuring.clear()
        gathering.folds_before += gathering.folds
        gathering.folds = 0

    # -- a fold ----------------------------------------------------------------------------------------------

    def fold(self, learning_rate_factor: float) -> tuple[list[Contribution], Fold]:
        """Plan the fold of all updates that wait into the next version, and count it for their members."""
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
        for one, share, clip in zip(contributions, shares, clips, strict=True):  # one loop, for often it is one
            weight = share * clip
            handles.append(one.handle)
            weights.append(weight)
            norms.append(one.norm)
            lengths.append(abs(weight) * one.norm)
            if (member := self._members.members.get(one.device_id)) is not None:
                member.count_folded(share, clip)
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
        # An infrequent device's update is old: whether it agrees with the others says nothing of the period.
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
        """Record the norm of the weighted sum that made a version: it shows how far the updates agree."""
        norms, weights = self.state.gathering.measuring.pop(number, ([], []))
        agreement = agreement_of(norm, norms, weights)
        if agreement is not None:
            self.state.fleet.observe_agreement(agreement)

    def _shares(
        self, contributions: Sequence[Contribution], fleet: Fleet
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return the updates' weights before any is shortened, and their rows for a robust combiner."""
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
        """Return weights of which each voter has one share, and the updates' rows for a robust combiner.

        Updates of one voter go to the same row; without rows, each has its own. Where updates are folded one by
        one, the devices of a voter take turns: each of their updates counts for its part of the vote.
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
        """Return the votes behind updates that are folded together, as a share of all.

        While the fleet rests, few devices may be awake. Each counts as much as it would among all: otherwise a
        device that exchanges alone would make the model its own.
        """
        if folds_one_by_one(self._in_force.aggregate):
            return 1.0
        shared = self._members.shared
        devices = dict.fromkeys([(one.device_id, one.voter) for one in contributions])  # in order, unlike a set
        votes = sum(1.0 / shared.get(voter, 1) for _, voter in devices)
        return min(1.0, votes / max(1, self._electorate.voters_live))

    def _clips(self, contributions: Sequence[Contribution]) -> list[float]:
        """Return the share of its length that each update counts with: the longest are shortened.

        Note whose are folded before there is a bound.
        """
        fleet, monitor, divergence = self.state.fleet, self._policy.monitor, self._divergence
        centred = self._policy.combine.centred
        # A combiner with a centre bounds the distance from there.
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
                norm = min(norm, usual) if centred else norm  # a combiner with a centre cuts the rest off itself
            clips.append(1.0 if norm <= norm_max else norm_max / norm)
        return clips

    def _slack(self, member: Member) -> float:
        """Return what share of the highest usual length a voter's update may have: 1 before its first long one.

        A device whose data the model does not know yet sends long updates, and shorter ones as they count. Those
        of a hostile one stay long.
        """
        return math.pow(0.5, self._members.long_updates_of_voter(member) / SLACK_UPDATES)

    @property
    def _norm_usual(self) -> float:
        """The voters' median norm; infinity while too few are known."""
        lengths = self.state.fleet.lengths
        return lengths.median if len(lengths) >= DEVICES_MIN and lengths.median > 0.0 else math.inf

    def check(self) -> None:
        """Raise `AssertionError` if the counts contradict one another."""
        gathering = self.state.gathering
        assert len(gathering.contributions) < self._settings.limits.updates_held_max
        self._waiting.check(gathering.contributions, self._electorate.fleet())
        assert len(gathering.measuring) <= self.state.version


def _only_best(contributions: Sequence[Contribution], weights: Sequence[float], least: float) -> tuple[float, ...]:
    """Give the weight of all updates to the one with the lowest score of at least `least`, if there is one."""
    scored = [position for position, one in enumerate(contributions) if one.score >= least]
    if not scored:
        return tuple(weights)
    best = min(scored, key=lambda position: contributions[position].score)
    total = math.fsum(weights)
    return tuple(total if position == best else 0.0 for position in range(len(contributions)))
