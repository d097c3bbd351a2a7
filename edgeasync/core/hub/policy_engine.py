"""Applies the policies: decides the outcome of every update, and when to fold. Part of `HubCore`; scalars only.

Policies are plain values. `PolicyEngine` holds the state that they decide from: the updates that wait, the
measurements of the fleet, the active alarms, the cadence. `HubCore` asks it, and deals with the protocol.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from edgeasync.core.hub.divergence import DivergenceGuard, DivergenceState
from edgeasync.core.hub.effects import Broadcast, Discard, Evaluate, Fold, HubEffect, HubReport, Keep, Restore
from edgeasync.core.hub.evaluation_tracker import EvaluationState, EvaluationTracker
from edgeasync.core.hub.events import Evaluated, PushArrived
from edgeasync.core.hub.lineage import Ancestry
from edgeasync.core.hub.membership import SAMPLE, Member, Membership
from edgeasync.core.hub.outcomes import QUARANTINED, ROLLED_BACK
from edgeasync.core.hub.reported_stats import ReportedStats
from edgeasync.core.hub.rest import MEASURED_UPDATES, NEW_UPDATES, ROUSED_UPDATES, Rest, RestState
from edgeasync.core.hub.settings import HubCoreSettings, parse_every
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.measurements.fleet import FleetMeasurements, agreement_of
from edgeasync.measurements.medians import WINDOW, median
from edgeasync.measurements.votes import DEVICES_MIN
from edgeasync.policies.aggregation import Aggregator, Contribution, Fleet, Waiting
from edgeasync.policies.budget import EXCHANGES_UNCHANGED, has_changed
from edgeasync.policies.frequency import INFREQUENT, AdaptiveFrequency, Cadence, FrequencyController, Interval
from edgeasync.policies.guards import guarded
from edgeasync.policies.monitor import STEPS_FACTOR, Observation
from edgeasync.policies.policy import PolicySet, folds_one_by_one
from edgeasync.policies.staleness import Staleness
from edgeasync.policies.transforms import Conditions, plan_chain
from edgeasync.protocol.messages import Applied, Buffered, FirstOutcome, ModelVersion, Push, Refuse, Rejected

VOTERS_WITH_A_SHARE = 4
"""One voter's waiting updates take at most a fourth of the places; with fewer voters an equal share."""

RESTING = 2.0
"""From this many times the full pace's period on, people are told that the fleet rests."""

EVALUATED_AT_REST_S = 10.0
"""While the fleet rests, every version is evaluated, but no more often than this."""

SLACK_UPDATES = 64
"""A voter's first long update may be as long as was ever usual; half as long after this number of them."""

EXAMPLES_RATIO_MAX = 10.0
"""A device counts with at most this many times the median of the examples that devices say they have."""


class PolicyEngineState(msgspec.Struct):
    """The durable fields of `PolicyEngine`.

    `spoken` has the live devices that sent an update since the last version, but one that does not count.
    `infrequent` has the live devices that no quorum waits for, and their votes. Since `loss_mark_updates` updates
    the fleet's loss has not differed from `loss_mark` by more than noise. `version_oldest` is the oldest base that
    counts: a rollback raises it. `updates` counts updates folded under this policy, `updates_applied` those of the
    whole run. `examples_seen` is a float because devices choose the summands: their sum as an integer could become
    too large to encode. `measuring` has the norms and weights of the updates of a version, until its fold reports
    the norm of their sum.
    """

    ancestry: Ancestry
    version: int
    version_oldest: int
    evaluations: EvaluationState
    divergence: DivergenceState
    warm: bool
    fleet: FleetMeasurements = msgspec.field(default_factory=FleetMeasurements)
    cadence: Cadence = Cadence()
    contributions: list[Contribution] = []
    spoken: dict[str, None] = {}
    infrequent: dict[str, float] = {}
    folds: int = 0
    folds_before: int = 0
    measuring: dict[int, tuple[list[float], list[float]]] = {}
    retune_in: int = 0
    devices: int = 0
    score_best: float = math.inf
    examples_total: float = 0.0
    examples_seen: float = 0.0
    examples_median: float = 0.0
    updates: int = 0
    updates_applied: int = 0
    updates_rejected: int = 0
    loss_mark: float = math.inf
    loss_mark_updates: int = 0
    rest: RestState = msgspec.field(default_factory=RestState)


class PolicyEngine:
    """Weighs and gathers updates, plans folds, sets the cadence, watches for divergence. Deterministic."""

    def __init__(
        self, policy: PolicySet, version: ModelVersion, members: Membership, settings: HubCoreSettings
    ) -> None:
        policy = guarded(policy)
        self.policy = policy
        self.evaluations = EvaluationTracker(policy.plateau, settings.stop, held_out=settings.held_out)
        self.divergence = DivergenceGuard(policy.monitor, probation=policy.trust == "open")
        self.rest = Rest()
        self.state = PolicyEngineState(
            ancestry=Ancestry(version.lineage),
            version=version.number,
            version_oldest=version.number,
            evaluations=self.evaluations.state,
            divergence=self.divergence.state,
            rest=self.rest.state,
            warm=policy.warm_up is None,
        )
        self._members = members
        self._settings = settings
        self._evaluated_every = parse_every(settings.evaluation.every)
        self._waiting = Waiting(self.state.contributions)
        self._overlap_steps_max = max(policy.overlap_steps_max, policy.delay_steps)
        self._leaves_out = policy.behind_max is not None or policy.take != "all"
        self._enforce()

    def load_state(self, state: PolicyEngineState) -> None:
        """Resume from a durable state, which is this object's from then on."""
        self.state = state
        self.evaluations.state = state.evaluations
        self.divergence.state = state.divergence
        self.rest.state = state.rest
        self._waiting = Waiting(state.contributions)
        self._enforce()

    # -- the policies in force -------------------------------------------------------------------------------

    def _enforce(self) -> None:
        """Note which policies are in force: those of the warm-up until it is over."""
        part = self.policy if self.state.warm or self.policy.warm_up is None else self.policy.warm_up
        self.aggregate: Aggregator = part.aggregate
        self.frequency: FrequencyController = part.frequency
        frequency = self.frequency
        self.pacing = frequency if self._settings.quiet and isinstance(frequency, AdaptiveFrequency) else None
        """The controller in force if the fleet may rest under it."""

    def is_crowding(self, voter: str) -> bool:
        """Whether as many updates of a voter wait as may: the others must find places, or it would fold alone."""
        places = self._settings.limits.updates_held_max
        waiting = self._waiting.of_voter.get(voter, 0)
        if VOTERS_WITH_A_SHARE * waiting < places:
            return False
        share = math.ceil(places / max(1, min(VOTERS_WITH_A_SHARE, len(self._members.voters))))
        return share <= waiting and share < places

    @property
    def updates_waiting(self) -> int:
        """How many updates wait to be folded."""
        return len(self.state.contributions)

    def updates_waiting_of(self, device_id: str) -> int:
        """Return how many of a device's updates wait to be folded."""
        if device_id not in self._waiting.of_device:
            return 0
        return sum(one.device_id == device_id for one in self.state.contributions)

    @property
    def learning_rate_factor(self) -> float:
        """The factor that plateaus and remedies leave of the hub's learning rate."""
        return self.state.evaluations.learning_rate_factor * self.divergence.learning_rate_factor

    def next_fold_s(self, now_s: float = math.inf) -> float | None:
        """Return when the updates that wait are due: `now_s` if no more may wait, `None` if that is unknown."""
        contributions = self.state.contributions
        if not contributions:
            return None
        if len(contributions) >= self._settings.limits.updates_held_max:
            return now_s
        refused = self._votes_of_the_refused() if self.state.spoken else 0.0
        return self.aggregate.flush_at_s(self._waiting, self._fleet(refused))

    def _votes_of_the_refused(self) -> float:
        """Return the votes of the devices that sent an update for the next version which does not count."""
        # Not of those that pause, or that an operator has excluded: they have no vote.
        heard = (self.state.infrequent, self._waiting.of_device, self._members.pausing)
        members, shared, orders = self._members.members, self._members.shared, self.state.divergence.orders
        # Not the sum over a set: its order, and so the sum's last bit, changes with every start of Python.
        refused = [
            members[device_id] for device_id in self.state.spoken if not any(device_id in part for part in heard)
        ]
        return sum(1.0 / shared.get(member.voter, 1) for member in refused if member.voter not in orders)

    def _votes_of_the_pausing(self) -> int:
        """Return how many voters sent an update for the next version, and have only devices that pause by now."""
        first = self._waiting.of_device
        spoken = {first[device_id].voter for device_id in self._members.pausing if device_id in first}
        return len(spoken - self._members.voters.keys())

    # -- an update arrives -----------------------------------------------------------------------------------

    def decide(self, member: Member, update: PushArrived, now_s: float) -> tuple[FirstOutcome, list[HubEffect]]:
        """Weigh an update; reject it, or let it wait and fold all that wait if they are due.

        Return its outcome, and the effects to carry out in order.
        """
        state, push, measurements = self.state, update.push, member.measurements
        stats = member.observe(
            push,
            now_s,
            overlap_steps_max=self._overlap_steps_max,
            slack_s=self._members.lease_s,
        )
        weight, effects = self._weigh(member, update, stats, now_s)
        measurements.counted = not isinstance(weight, Rejected)
        if self.pacing is not None:
            effects += self._note_news(member, now_s)
        state.retune_in -= 1
        if state.retune_in <= 0:
            effects += self._retune(now_s)
        if isinstance(weight, Rejected):
            self._count_rejected(member.device_id, weight.reason)
            if weight.reason in ("not_finite", "quarantined", "behind"):
                state.spoken[member.device_id] = None  # a quorum need not wait for this device
            effects.append(Discard(update.handle))
            return weight, effects + self.fold_if_due(now_s)
        contribution = Contribution(
            handle=update.handle,
            device_id=member.device_id,
            weight=weight,
            norm=update.norm,
            examples=self._examples(measurements.examples or stats.examples),
            local_steps=stats.local_steps,
            staleness=measurements.staleness,
            score=measurements.score,
            arrived_s=now_s,
            voter=member.voter,
        )
        self._waiting.append(contribution)
        state.spoken.pop(member.device_id, None)
        state.divergence.counted[member.device_id] = None
        effects += self.fold_if_due(now_s)
        waiting = len(state.contributions)
        return Buffered(waiting) if waiting else Applied(state.version), effects

    def _examples(self, told: int) -> int:
        """Return how many examples a device counts with: not more than a multiple of what the others told."""
        most = EXAMPLES_RATIO_MAX * self.state.examples_median
        return min(told, int(most)) if most else told

    def _weigh(
        self, member: Member, update: PushArrived, stats: ReportedStats, now_s: float
    ) -> tuple[float | Rejected, list[HubEffect]]:
        """Return an update's weight, or why it never counts, and reports of alarms that begin or end with it.

        The detectors of devices see every update, also one that is rejected after that. The fleet's measurements
        and its detectors see only updates that count, but for norms and losses: what is common is what the devices
        send, or a fleet could grow out of all of them.
        """
        push, measurements, fleet = update.push, member.measurements, self.state.fleet
        voter, voters_live = member.voter, self._voters_live
        reason = self._refuse_base(push, measurements)
        compared = reason is None and not stats.alone
        observation = Observation(
            member.device_id,
            update.norm if compared else math.nan,
            stats.local_steps,
            stats.loss_mean,
            voter,
            finite=math.isfinite(update.norm) and (stats.loss_mean is None or math.isfinite(stats.loss_mean)),
            known=reason is None or reason.reason == "rolled_back",
            base_loss=measurements.base_losses.usual if compared else math.nan,
            slowness=fleet.slowness(measurements.staleness, stats.local_steps) if reason is None else 1.0,
        )
        effects, roll_back = self.divergence.watch_device(
            observation, fleet, now_s, voters=self._members.voters, voters_live=voters_live, calms=compared
        )
        if roll_back:
            return Rejected("rolled_back"), effects + self._roll_back()
        if reason is not None:
            return reason, effects
        if voter in self.state.divergence.orders:
            return Rejected("quarantined", self.policy.preempt), effects
        if compared:
            fleet.observe_norm(voter, update.norm, stats.local_steps)
            fleet.observe_base_loss(voter, measurements.base_losses.newest)
        if not math.isfinite(update.norm):
            return Rejected("not_finite", self.policy.preempt), effects
        weight = self.policy.staleness(Staleness(measurements.staleness, self._members.live_count))
        if weight is None:
            return Rejected("stale"), effects
        far_behind = self._leaves_out and self._is_far_behind(measurements.score)
        left_out = self._leaves_out and (far_behind or self._is_left_out(measurements.score))
        fleet.observe_score(voter, measurements.score)  # of all: the median of those that count could never rise
        fleet.observe_loss(voter, stats.loss_mean, stats.loss_variance, voters_live)
        if left_out:
            return Rejected("behind", far_behind and self.policy.preempt), effects
        fleet.observe_staleness(measurements.staleness)
        reports, fault = self.divergence.watch_fleet(observation, fleet, now_s)
        effects += reports
        if fault is not None:
            return Rejected("rolled_back"), effects + self._roll_back(keeps_lengths=fault == "first")
        return weight, effects

    def _refuse_base(self, push: Push, measurements: DeviceMeasurements) -> Rejected | None:
        """Record the staleness of an update; return why its base does not count, if it does not."""
        if not self.state.ancestry.knows(push.base):
            return Rejected("foreign_lineage")
        staleness = self.state.version - push.base.number
        if staleness < 0:
            return Rejected("future_version")
        measurements.staleness = staleness
        return Rejected("rolled_back") if push.base.number < self.state.version_oldest else None

    def _is_far_behind(self, score: float) -> bool:
        """Return whether a device with this score is too far behind the others for its update to count.

        A device that tells no score has NaN, and is not behind.
        """
        limit = self.policy.behind_max
        if limit is None:
            return False
        usual = self.state.fleet.score
        return score > usual + (limit - 1.0) * abs(usual)

    def _is_left_out(self, score: float) -> bool:
        """Return whether a device with this score is not among those whose updates the policy takes."""
        if self.policy.take == "all":
            return False
        usual = self.state.fleet.score
        if math.isnan(usual):
            return False
        if self.policy.take == "best" and folds_one_by_one(self.aggregate):
            return score > self.state.score_best or score < self.state.fleet.scores.least_credible
        return self.policy.take == "better" and score > usual

    def is_learning(self) -> bool:
        """Whether the devices' losses have changed lately, or are not known."""
        unchanged = self.state.updates_applied - self.state.loss_mark_updates
        return math.isinf(self.state.loss_mark) or unchanged < EXCHANGES_UNCHANGED * self._members.live_count

    def forget(self, member: Member) -> None:
        """Forget of a device that is gone that it has spoken, and its voter's word if that is gone, too.

        Alarms, orders and what is known of its data stay: a restart changes nothing about that.
        """
        self.state.spoken.pop(member.device_id, None)
        self._count_as_usual(member)
        self.withdraw(member.voter)

    def pause(self, member: Member) -> None:
        """Note that a device says that it pauses: no quorum waits for it, and its exchange measures no link."""
        member.assigned = None
        self._count_as_usual(member)

    @property
    def _voters_live(self) -> int:
        """How many voters have a live device and a vote: those that an operator has excluded have none."""
        voters, orders = self._members.voters, self.state.divergence.orders
        return len(voters) - sum(voter in voters for voter in orders) if orders else len(voters)

    def _count_as_usual(self, member: Member) -> None:
        """Forget that a device was infrequent; the table is replaced, never changed: votes are counted by it."""
        infrequent = self.state.infrequent
        if member.device_id in infrequent:
            self.state.infrequent = {name: vote for name, vote in infrequent.items() if name != member.device_id}

    def withdraw(self, voter: str) -> None:
        """Forget what a voter said of the model if it has no live device."""
        if voter not in self._members.voters:
            self.state.fleet.withdraw(voter)

    def revoke(self, member: Member, now_s: float) -> None:
        """Take every vote from a member whose key counts no more, once its voter has no live device."""
        self.divergence.revoke(member.voter, member.device_id, now_s)
        if member.voter not in self._members.voters:
            self.state.fleet.revoke(member.voter)

    def voter_of(self, device_id: str) -> str | None:
        """Return a device's voter; of one that the hub has forgotten while there is an order or an alarm."""
        member = self._members.members.get(device_id)
        return self.divergence.voter_of(device_id) if member is None else member.voter

    def quarantine(self, voter: str, device_id: str, now_s: float) -> list[HubEffect]:
        """Exclude a device and all of its voter, by an operator's order; nothing if that is done already.

        Nobody waits for them any more.
        """
        effects = self.divergence.order(voter, device_id, now_s)
        if not effects:
            return []
        state, members = self.state, self._members.members
        state.fleet.revoke(voter)
        for name in [name for name in state.infrequent if members[name].voter == voter]:
            self._count_as_usual(members[name])
        for name in dict.fromkeys([one.device_id for one in state.contributions if one.voter == voter]):
            effects += self.drop_updates(name, QUARANTINED)
        return effects + self.fold_if_due(now_s)

    def release(self, voter: str, device_id: str, now_s: float) -> list[HubEffect]:
        """End the order about a device and its voter, and the alarms about them; nothing if there is neither."""
        return self.divergence.release(voter, device_id, now_s)

    def is_quarantined(self, member: Member) -> bool:
        """Whether an operator has excluded the device, or another with its key."""
        return member.voter in self.state.divergence.orders

    def drop_updates(self, device_id: str, reason: str) -> list[HubEffect]:
        """Drop the updates of a device that wait to be folded, for this reason."""
        state = self.state
        dropped = [one for one in state.contributions if one.device_id == device_id]
        state.contributions = [one for one in state.contributions if one.device_id != device_id]
        self._waiting = Waiting(state.contributions)
        for one in dropped:
            self._count_rejected(one.device_id, reason)
        return [Discard(one.handle) for one in dropped]

    def _count_rejected(self, device_id: str, reason: str) -> None:
        """Count an update that never counts, for all and for its device."""
        self.state.updates_rejected += 1
        if (member := self._members.members.get(device_id)) is not None:
            member.updates_rejected[reason] = member.updates_rejected.get(reason, 0) + 1

    # -- a version is made -----------------------------------------------------------------------------------

    def fold_if_due(self, now_s: float) -> list[HubEffect]:
        """Make the next version of all updates that wait, if it is time."""
        due_s = self.next_fold_s(now_s)
        return [] if due_s is None or due_s > now_s else self.fold(now_s)

    def fold(self, now_s: float) -> list[HubEffect]:
        """Make the next version of all updates that wait, and evaluate it if an evaluation is due."""
        state = self.state
        contributions, state.contributions = state.contributions, []
        self._waiting = Waiting(state.contributions)
        shares, rows = self._shares(contributions)
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
        count = len(contributions)
        voters = 1 if count == 1 else len({one.voter for one in contributions})
        conditions = Conditions(
            math.fsum(lengths),
            state.folds,
            state.fleet.staleness_mean,
            state.folds_before,
            state.fleet.extrapolation(voters),
            self._voters_live,
        )
        plan = plan_chain(self.policy.optimizer, conditions)
        state.folds += 1
        self._advance()
        combine = self.policy.combine
        # An infrequent device's update is old: whether it agrees with the others says nothing of the period.
        infrequent = state.infrequent and any(one.device_id in state.infrequent for one in contributions)
        measure = count > 1 and not combine.robust and not infrequent
        if measure:
            state.measuring[state.version] = (norms, weights)
        fold = Fold(
            number=state.version,
            handles=tuple(handles),
            weights=tuple(weights),
            plan=plan,
            scale=self.learning_rate_factor,
            measure=measure,
            rows=rows,
            norm_usual=self._norm_usual if combine.centred else math.inf,
        )
        return [
            fold,
            *self._count(contributions, shares, clips),
            *self._evaluate_if_due(count, now_s),
        ]

    def _shares(self, contributions: Sequence[Contribution]) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return the updates' weights before any is shortened, and their rows for a robust combiner."""
        weights = self.aggregate.weights(contributions, self._fleet())
        if self.policy.take == "best":
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
        if folds_one_by_one(self.aggregate):
            shared = self._members.shared
            if not shared:
                return weights, ()
            votes = [1.0 / shared.get(one.voter, 1) for one in contributions]
            return tuple([weight * vote for weight, vote in zip(weights, votes, strict=True)]), ()
        if not self.policy.combine.robust:
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
        if folds_one_by_one(self.aggregate):
            return 1.0
        shared = self._members.shared
        devices = dict.fromkeys([(one.device_id, one.voter) for one in contributions])  # in order, unlike a set
        votes = sum(1.0 / shared.get(voter, 1) for _, voter in devices)
        return min(1.0, votes / max(1, self._voters_live))

    def _clips(self, contributions: Sequence[Contribution]) -> list[float]:
        """Return the share of its length that each update counts with: the longest are shortened.

        Note whose are folded before there is a bound.
        """
        fleet, monitor, divergence = self.state.fleet, self.policy.monitor, self.divergence
        centred = self.policy.combine.centred
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

    def _count(
        self, contributions: Sequence[Contribution], weights: Sequence[float], clips: Sequence[float]
    ) -> list[HubEffect]:
        """Count folded updates: for the warm-up, for the members, and for the next version to keep."""
        state, warm_up = self.state, self.policy.warm_up
        effects: list[HubEffect] = []
        state.updates += len(contributions)
        for contribution, weight, clip in zip(contributions, weights, clips, strict=True):
            if (member := self._members.members.get(contribution.device_id)) is not None:
                member.count_folded(weight, clip)
        if not state.warm and warm_up is not None:
            if warm_up.epochs:
                state.examples_seen += self._examples_trained(contributions)
            # If no device says how much data it has, there are no epochs to wait for.
            epochs = state.examples_seen / state.examples_total if state.examples_total else math.inf
            state.warm = state.updates >= warm_up.updates if warm_up.updates else epochs >= (warm_up.epochs or 0.0)
            if state.warm:
                self._enforce()
                effects.append(HubReport("warm", detail=f"the warm-up is over after {state.updates} updates"))
        if self.divergence.count_folded(len(contributions), state.devices):
            effects.append(Keep())
        return effects

    def _examples_trained(self, contributions: Sequence[Contribution]) -> float:
        """Return how many examples updates were trained on: in each step not more than the voters' median.

        Devices may say what they like. It looks at the first devices only, so that it costs little.
        """
        members = self._members.members
        known = [member for member in islice(members.values(), WINDOW) if member.measurements.updates]
        of_voters = {member.voter: member.measurements.batch_examples for member in known}
        most = median(of_voters.values()) if len(of_voters) >= DEVICES_MIN else math.inf
        told = [(one, members.get(one.device_id)) for one in contributions]
        return math.fsum(
            one.local_steps * min(most, member.measurements.batch_examples)
            for one, member in told
            if member is not None
        )

    def _evaluate_if_due(self, updates: int, now_s: float) -> list[HubEffect]:
        """Count applied updates; if an evaluation is due, evaluate the model, or use the devices' losses."""
        before, evaluations = self.state.updates_applied, self.state.evaluations
        self.state.updates_applied += updates
        every_updates, every_s = self._evaluated_every
        passed_s = now_s - evaluations.begun_s
        due = self.state.updates_applied // every_updates != before // every_updates or passed_s >= every_s
        if not due and not (self.rest.state.resting and passed_s >= EVALUATED_AT_REST_S):
            return []
        evaluations.begun_s = now_s
        if self._settings.held_out:
            return [Evaluate()]
        members = self._members.sample(self.state.version)
        if (loss := self._members.loss_of_majority(members)) is not None:
            return self.observe_evaluation(Evaluated(self.state.version, loss, None), now_s)
        silent = any(one.measurements.counted and one.measurements.loss_mean is None for one in members)
        return self.evaluations.warn_unjudged() if silent else []

    @property
    def wants_last_evaluation(self) -> bool:
        """Whether the newest version can be evaluated, and was not since this start of the hub."""
        state, last = self.state, self.state.evaluations.last
        resumed = max(state.ancestry.shared.values(), default=-1)  # under what may have been other data
        known = last is not None and resumed < last.number == state.version
        return self._settings.held_out and not known

    def observe_evaluation(self, evaluation: Evaluated, now_s: float) -> list[HubEffect]:
        """Compare an evaluation with those before it."""
        factor = self.learning_rate_factor
        effects = self.evaluations.observe(evaluation, self.state.updates_applied, now_s)
        if self.pacing is None:
            return effects
        pace_s = self.state.cadence.period_s
        if self.learning_rate_factor < factor:
            self.rest.nudge(now_s, pace_s)
        if not self._settings.held_out:
            return effects
        return effects + self._rouse(
            self.rest.evaluated(evaluation.loss, evaluation.accuracy, now_s, pace_s), now_s
        )

    def observe_sum(self, number: int, norm: float) -> None:
        """Record the norm of the weighted sum that made a version: it shows how far the updates agree."""
        norms, weights = self.state.measuring.pop(number, ([], []))
        agreement = agreement_of(norm, norms, weights)
        if agreement is not None:
            self.state.fleet.observe_agreement(agreement)

    def _advance(self) -> None:
        self.state.version += 1
        self.state.spoken.clear()

    def _roll_back(self, *, keeps_lengths: bool = False) -> list[HubEffect]:
        """Restore the kept version under a new number; drop the updates that wait, and reject earlier bases.

        If one of the first updates spoilt the model, the usual length is known by now. It bounds what that device
        sends next: without it, the first to push would spoil the model again.
        """
        state = self.state
        effects: list[HubEffect] = [Discard(contribution.handle) for contribution in state.contributions]
        for one in state.contributions:
            self._count_rejected(one.device_id, ROLLED_BACK)
        state.contributions = []
        self._waiting = Waiting(state.contributions)
        state.measuring.clear()
        self.divergence.rolled_back()
        state.fleet.forget(keeps_lengths=keeps_lengths)
        self._advance()
        state.version_oldest = state.version
        state.folds_before += state.folds
        state.folds = 0
        return [*effects, Restore(state.version)]

    # -- the fleet -------------------------------------------------------------------------------------------

    def assign_steps(self, measurements: DeviceMeasurements) -> int:
        """Set the local steps of a device's next assignment, and note them in its measurements."""
        cadence = self.state.cadence
        steps_factor = STEPS_FACTOR if self.divergence.is_active("increase_frequency") else 1.0
        if cadence.steps_factor != steps_factor:
            cadence = msgspec.structs.replace(cadence, steps_factor=steps_factor)
        if (pacing := self.pacing) is not None and not pacing.rest and not self._keeps_pace(measurements):
            cadence = msgspec.structs.replace(cadence, period_s=self._stretched_s(pacing))
        interval: Interval = self.frequency.interval(measurements, cadence)
        measurements.assigned_steps, measurements.why = interval.local_steps, interval.why
        measurements.bound = interval.bound
        return interval.local_steps

    def _retune(self, now_s: float) -> list[HubEffect]:
        """Retune the cadence to the fleet, or to a sample: after half as many updates as it looks at devices."""
        state, devices_live = self.state, self._members.live_count
        sample = self._members.sample(state.version)
        measurements = self._members.live_measurements(sample)
        state.fleet.note_peaks(self._voters_live)
        self.divergence.keep_only(self._members.members)
        state.devices = devices_live
        state.retune_in = max(1, min(devices_live, SAMPLE) // 2)
        least = state.fleet.scores.least_credible
        scores = [one.score for one in measurements if one.counted and one.score >= least]
        state.score_best = min(scores, default=math.inf)
        with_data = [one.examples for one in measurements if one.examples]
        state.examples_median = float(median(with_data)) if len(with_data) >= DEVICES_MIN else 0.0
        with_data = [self._examples(examples) for examples in with_data]
        state.examples_total = float(sum(with_data) * self._members.stride)
        pacing = self.pacing
        retune = self.frequency.retune if pacing is None else pacing.retune_quietly
        active = [one for one in measurements if one.updates]
        cadence = retune(state.cadence, state.fleet, active)
        # Updates come that rarely only if more than half of the devices rest so long for their day's bytes.
        rests_s = sorted([one.period_s_min for one in active])
        if rests_s and (rest_s := rests_s[(len(rests_s) - 1) // 2]) > cadence.period_s:
            cadence = msgspec.structs.replace(cadence, period_s=rest_s)
        state.cadence = cadence
        overdue_s = now_s - INFREQUENT * cadence.period_s if cadence.period_s else -math.inf
        voting = [one for one in sample if one.voter not in state.divergence.orders]
        state.infrequent = self._members.note_infrequent(state.infrequent, voting, cadence.infrequent_s, overdue_s)
        loss = state.fleet.loss
        if not math.isnan(loss) and has_changed(loss, state.loss_mark, state.fleet.loss_first):
            state.loss_mark, state.loss_mark_updates = loss, state.updates_applied
        return [] if pacing is None else self._judge(pacing, now_s)

    # -- rest ------------------------------------------------------------------------------------------------

    def rest_s(self, member: Member, now_s: float) -> float:
        """Return how long a device is to rest before its next assignment, 0 if it is not to."""
        pacing = self.pacing
        if pacing is None or not self.rest.state.resting or self._keeps_pace(member.measurements):
            return 0.0
        return member.assigned_s + self._stretched_s(pacing) - now_s

    def _stretched_s(self, pacing: AdaptiveFrequency) -> float:
        return self.rest.period_s(self.state.cadence.period_s, pacing.period_s_max)

    def _keeps_pace(self, measurements: DeviceMeasurements) -> bool:
        """Whether a device does not rest: it is new, or its own loss has risen."""
        return measurements.roused > 0 or measurements.updates < MEASURED_UPDATES

    def _note_news(self, member: Member, now_s: float) -> list[HubEffect]:
        """Look for news in an update: of a device whose data have changed, or of a newcomer's."""
        measurements = member.measurements
        if self.rest.has_news(measurements.base_losses):
            measurements.roused = ROUSED_UPDATES
        elif measurements.roused:
            measurements.roused -= 1
        if measurements.updates != NEW_UPDATES:
            return []
        woken = self.rest.joined(member.voter, member.device_id, measurements.base_losses, now_s)
        return self._rouse(woken, now_s)

    def _judge(self, pacing: AdaptiveFrequency, now_s: float) -> list[HubEffect]:
        """Judge by the devices whether the model gets better; tell people when the fleet begins to rest."""
        rest, state, held_out = self.rest, self.state, self._settings.held_out
        pace_s, losses = state.cadence.period_s, state.fleet.base_losses
        if losses.newest:
            woken = rest.told(losses, self._voters_live, now_s, pace_s, judges=not held_out)
        else:
            woken = not held_out and rest.moved(state.fleet.agreement, now_s, pace_s)
        effects = self._rouse(woken, now_s)
        period_s = self._stretched_s(pacing)
        if rest.state.resting or period_s < RESTING * pace_s:
            return effects
        rest.state.resting = True
        still = f"the model has stood still for {rest.still_s:.0f} s"
        return [*effects, HubReport("resting", detail=f"{still}: exchanges become rarer")]

    def wake(self, cause: str, now_s: float) -> list[HubEffect]:
        """Bring the fleet back to its full pace."""
        return self._rouse(self.rest.wake(cause, now_s), now_s)

    def _rouse(self, woken: bool, now_s: float) -> list[HubEffect]:  # noqa: FBT001
        """If the fleet is woken, tell the devices that rest to ask for an assignment soon."""
        if not woken:
            return []
        resting = [member for member in self._members.members.values() if member.rest_until_s > now_s]
        for member in resting:
            member.rest_until_s = now_s
        peers = tuple([member.peer for member in resting if member.live and member.peer])
        refuse = Refuse("busy", "the fleet wakes", self._settings.limits.retry_after_s)
        return [HubReport("awake", detail=self.rest.state.cause), Broadcast(peers, refuse)]

    def _fleet(self, refused: float = 0.0) -> Fleet:
        """Return the fleet as an aggregator sees it, without the votes of those that were refused."""
        state, members = self.state, self._members
        pausing = self._votes_of_the_pausing() if members.pausing else 0
        voters_live = self._voters_live + pausing - refused
        return Fleet(voters_live, state.cadence.period_s, members.shared, state.infrequent)

    # -- status and checks -----------------------------------------------------------------------------------

    def describe(self, devices: Sequence[DeviceMeasurements] = ()) -> dict[str, Any]:
        """Return the policies' part of the status (docs/reference/json.md), and the period of these devices.

        `period_s` is the median of the times between their exchanges, but for infrequent ones; `aim_s` is what the
        controller aims at: bounds may keep the devices from it.
        """
        state = self.state
        fleet, cadence = state.fleet, state.cadence
        measured = [device for device in devices if device.step_s]
        usual = [one.period_s or one.cycle_s for one in measured if not cadence.is_infrequent(one)]
        bounds = Counter(device.bound for device in measured if device.bound)
        bound = bounds.most_common(1)[0][0] if 2 * bounds.total() >= len(measured) > 0 else ""
        return {
            "cadence": {
                "period_s": round(statistics.median(usual) if usual else 0.0, 6),
                "aim_s": round(cadence.period_s, 6),
                "bound": bound,
                "gain": round(cadence.gain, 3),
                "cause": cadence.cause if cadence.gain < 1.0 else "",
                "warming_up": not state.warm,
                **self._describe_rest(),
            },
            "fleet": {
                "staleness_mean": round(fleet.staleness_mean, 3),
                "agreement": _number(fleet.agreement),
                "loss": _number(fleet.loss),
                "loss_variance": _number(fleet.loss_variance),
            },
            "learning_rate_factor": self.learning_rate_factor,
            "rollbacks": state.divergence.rollbacks,
            "evaluation": _evaluation(state.evaluations.last),
            "best": _evaluation(state.evaluations.best),
        }

    def _describe_rest(self) -> dict[str, Any]:
        pacing, rest = self.pacing, self.rest
        return {
            "resting": rest.state.resting,
            "rest_period_s": round(self._stretched_s(pacing), 6) if pacing and rest.state.resting else 0.0,
            "still_s": round(rest.still_s, 3) if pacing else 0.0,
            "rest_cause": rest.state.cause,
        }

    def check(self) -> None:
        """Raise `AssertionError` if the counts contradict one another."""
        state = self.state
        assert len(state.contributions) < self._settings.limits.updates_held_max
        self._waiting.check(state.contributions, self._fleet())
        assert state.updates_applied >= state.updates
        assert len(state.measuring) <= state.version


def _number(value: float) -> float | None:
    """Return a number for JSON: with six digits, or `None` if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _evaluation(evaluated: Evaluated | None) -> dict[str, Any] | None:
    if evaluated is None:
        return None
    return {"version": evaluated.number, "loss": _number(evaluated.loss), "accuracy": evaluated.accuracy}


def _only_best(contributions: Sequence[Contribution], weights: Sequence[float], least: float) -> tuple[float, ...]:
    """Give the weight of all updates to the one with the lowest score of at least `least`, if there is one."""
    scored = [position for position, one in enumerate(contributions) if one.score >= least]
    if not scored:
        return tuple(weights)
    best = min(scored, key=lambda position: contributions[position].score)
    total = math.fsum(weights)
    return tuple(total if position == best else 0.0 for position in range(len(contributions)))
