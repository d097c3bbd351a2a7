"""Decides which updates count, and with which weights. Part of `PolicyEngine`."""

import math
from typing import NamedTuple

from edgeasync.core.hub.divergence import DivergenceGuard, Fault
from edgeasync.core.hub.effects import HubEffect
from edgeasync.core.hub.electorate import Electorate
from edgeasync.core.hub.events import PushArrived
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.policies_in_force import PoliciesInForce
from edgeasync.core.hub.policy_state import PolicyEngineState
from edgeasync.core.hub.reported_stats import ReportedStats
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.policies.monitor import Observation
from edgeasync.policies.policy import folds_one_by_one
from edgeasync.policies.staleness import Staleness
from edgeasync.protocol.messages import Push, Rejected


class Weighed(NamedTuple):
    """An update's weight or rejection, alarm reports, and the cause of a rollback."""

    weight: float | Rejected
    effects: list[HubEffect]
    fault: Fault | None = None


class Weighing:
    """Compares an update with the fleet, and asks the policy for its weight."""

    def __init__(
        self,
        in_force: PoliciesInForce,
        electorate: Electorate,
        divergence: DivergenceGuard,
        state: PolicyEngineState,
    ) -> None:
        self.state = state
        self._policy = policy = in_force.policy
        self._in_force = in_force
        self._divergence = divergence
        self._electorate = electorate
        self._members = electorate.members
        self._leaves_out = policy.behind_max is not None or policy.take != "all"

    def weigh(self, member: Member, update: PushArrived, stats: ReportedStats, now_s: float) -> Weighed:
        """Return the weight of an update or its rejection.

        Device detectors process every update, including rejected ones. The fleet's detectors and
        most of its measurements process only updates that count. Norms and losses also include
        rejected updates. Otherwise, the limits could not follow a fleet whose norms grow.
        """
        measurements, fleet, policy = member.measurements, self.state.fleet, self._policy
        voter, voters_live = member.voter, self._electorate.voters_live
        reason = self._refuse_base(update.push, measurements)
        compared = reason is None and not stats.alone
        observation = self._observe(member, update, stats, reason, compared=compared)
        effects, epidemic = self._divergence.watch_device(
            observation, fleet, now_s, voters=self._members.voters, voters_live=voters_live, calms=compared
        )
        if epidemic:
            return Weighed(Rejected("rolled_back"), effects, "alarm")
        if reason is not None:
            return Weighed(reason, effects)
        if voter in self.state.divergence.orders:
            return Weighed(Rejected("quarantined", policy.preempt), effects)
        if compared:
            fleet.observe_norm(voter, update.norm, stats.local_steps)
            fleet.observe_base_loss(voter, measurements.base_losses.newest)
        if not math.isfinite(update.norm):
            return Weighed(Rejected("not_finite", policy.preempt), effects)
        weight = policy.staleness(Staleness(measurements.staleness, self._members.live_count))
        if weight is None:
            return Weighed(Rejected("stale"), effects)
        far_behind = self._leaves_out and self._is_far_behind(measurements.score)
        left_out = self._leaves_out and (far_behind or self._is_left_out(measurements.score))
        # Include rejected updates: with only accepted ones, the median could never rise.
        fleet.observe_score(voter, measurements.score)
        fleet.observe_loss(voter, stats.loss_mean, stats.loss_variance, voters_live)
        if left_out:
            return Weighed(Rejected("behind", far_behind and policy.preempt), effects)
        fleet.observe_staleness(measurements.staleness)
        reports, fault = self._divergence.watch_fleet(observation, fleet, now_s)
        return Weighed(weight if fault is None else Rejected("rolled_back"), effects + reports, fault)

    def _observe(
        self,
        member: Member,
        update: PushArrived,
        stats: ReportedStats,
        reason: Rejected | None,
        *,
        compared: bool,
    ) -> Observation:
        """Convert an update to the form that the monitor's detectors read."""
        measurements = member.measurements
        return Observation(
            member.device_id,
            update.norm if compared else math.nan,
            stats.local_steps,
            stats.loss_mean,
            member.voter,
            finite=math.isfinite(update.norm) and (stats.loss_mean is None or math.isfinite(stats.loss_mean)),
            known=reason is None or reason.reason == "rolled_back",
            base_loss=measurements.base_losses.usual if compared else math.nan,
            slowness=self.state.fleet.slowness(measurements.staleness, stats.local_steps)
            if reason is None
            else 1.0,
        )

    def _refuse_base(self, push: Push, measurements: DeviceMeasurements) -> Rejected | None:
        """Record the staleness of an update.

        Return its rejection if its base version is not valid.
        """
        if not self.state.ancestry.knows(push.base):
            return Rejected("foreign_lineage")
        staleness = self.state.version - push.base.number
        if staleness < 0:
            return Rejected("future_version")
        measurements.staleness = staleness
        return Rejected("rolled_back") if push.base.number < self.state.version_oldest else None

    def _is_far_behind(self, score: float) -> bool:
        """Return whether a device's score is so far behind that its update does not count.

        Without a reported score, `score` is NaN, which is never behind.
        """
        limit = self._policy.behind_max
        if limit is None:
            return False
        usual = self.state.fleet.score
        return score > usual + (limit - 1.0) * abs(usual)

    def _is_left_out(self, score: float) -> bool:
        """Return whether the policy's setting `take` excludes a device with this score."""
        take, usual = self._policy.take, self.state.fleet.score
        if take == "all" or math.isnan(usual):
            return False
        if take == "best" and folds_one_by_one(self._in_force.aggregate):
            return score > self.state.survey.score_best or score < self.state.fleet.scores.least_credible
        return take == "better" and score > usual
