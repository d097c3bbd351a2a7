"""Applies the policies to every update, and decides when to fold. Part of `HubCore`.

Policies are stateless values, which get their inputs from the parts of the engine: `Weighing`
decides which updates count, `Gathering` when and how to fold, `Electorate` which devices to wait
for, and `Pacing` how often devices exchange. `HubCore` calls the engine, and implements the
protocol. The engine works with scalars only.
"""

import math
from collections.abc import Sequence
from typing import Any

from edgeasync.core.hub.divergence import DivergenceGuard, Fault
from edgeasync.core.hub.effects import Discard, Evaluate, HubEffect, Keep, Restore
from edgeasync.core.hub.electorate import Electorate
from edgeasync.core.hub.evaluation_tracker import EvaluationTracker
from edgeasync.core.hub.events import Evaluated, PushArrived
from edgeasync.core.hub.gathering import Gathering
from edgeasync.core.hub.lineage import Ancestry
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.outcomes import QUARANTINED, ROLLED_BACK
from edgeasync.core.hub.pacing import Pacing
from edgeasync.core.hub.policies_in_force import PoliciesInForce
from edgeasync.core.hub.policy_state import PolicyEngineState, WarmUpState
from edgeasync.core.hub.settings import HubCoreSettings, parse_every
from edgeasync.core.hub.survey import Survey
from edgeasync.core.hub.weighing import Weighing
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.policies.aggregation import Contribution
from edgeasync.policies.guards import guarded
from edgeasync.policies.policy import PolicySet
from edgeasync.protocol.messages import Applied, Buffered, FirstOutcome, ModelVersion, Rejected
from edgeasync.protocol.status import EvaluationStatus, FleetStatus

EVALUATED_AT_REST_S = 10.0
"""Minimum time between two evaluations while the fleet is idle. The hub evaluates every version
then, but not more often than this.
"""

UNCOUNTED = ("not_finite", "quarantined", "behind")
"""If an update is rejected for one of these reasons, no quorum waits for its device."""


class PolicyEngine:
    """Decides on updates, creates versions, sets the cadence and detects divergence."""

    def __init__(
        self, policy: PolicySet, version: ModelVersion, members: Membership, settings: HubCoreSettings
    ) -> None:
        policy = guarded(policy)
        self.policy = policy
        self._members = members
        self._settings = settings
        self._evaluated_every = parse_every(settings.evaluation.every)
        self._overlap_steps_max = max(policy.overlap_steps_max, policy.delay_steps)
        self.state = state = PolicyEngineState(
            ancestry=Ancestry(version.lineage),
            version=version.number,
            version_oldest=version.number,
            warm_up=WarmUpState(over=policy.warm_up is None),
        )
        self.evaluations = EvaluationTracker(policy.plateau, settings.stop, held_out=settings.held_out)
        self.divergence = divergence = DivergenceGuard(policy.monitor, probation=policy.trust == "open")
        self.in_force = in_force = PoliciesInForce(policy, members, state.warm_up, quiet=settings.quiet)
        self.electorate = electorate = Electorate(members, state)
        self.survey = Survey(members, state.survey)
        self.weighing = Weighing(in_force, electorate, divergence, state)
        self.gathering = Gathering(in_force, electorate, divergence, settings, state)
        self.pacing = Pacing(in_force, electorate, divergence, settings, state)
        self.load_state(state)

    def load_state(self, state: PolicyEngineState) -> None:
        """Resume from a durable state. From then on, this object and its parts own it."""
        self.state = self.electorate.state = self.weighing.state = state
        self.evaluations.state = state.evaluations
        self.divergence.state = state.divergence
        self.survey.state = state.survey
        self.in_force.load_state(state.warm_up)
        self.gathering.load_state(state)
        self.pacing.load_state(state)

    @property
    def learning_rate_factor(self) -> float:
        """The factor by which plateaus and remedies scale the hub's learning rate."""
        return self.state.evaluations.learning_rate_factor * self.divergence.learning_rate_factor

    def is_learning(self) -> bool:
        """Return whether the losses of the devices changed recently or are unknown."""
        return self.survey.is_learning(self.state.updates_applied)

    # -- an update arrives -----------------------------------------------------------------------------------

    def decide(self, member: Member, update: PushArrived, now_s: float) -> tuple[FirstOutcome, list[HubEffect]]:
        """Reject or buffer an update, and fold if a fold is due.

        Return the update's outcome, and the effects to execute in order.
        """
        state, measurements = self.state, member.measurements
        stats = member.observe(
            update.push,
            now_s,
            overlap_steps_max=self._overlap_steps_max,
            slack_s=self._members.lease_s,
        )
        weight, effects, fault = self.weighing.weigh(member, update, stats, now_s)
        if fault is not None:
            effects += self._roll_back(fault)
        measurements.counted = not isinstance(weight, Rejected)
        effects += self.pacing.note_update(member, now_s)
        state.survey.due_in -= 1
        if state.survey.due_in <= 0:
            effects += self._look_at_fleet(now_s)
        if isinstance(weight, Rejected):
            self._count_rejected(member.device_id, weight.reason)
            member.notes.note_error(f"update rejected: {weight.reason}", now_s)
            if weight.reason in UNCOUNTED:
                state.electorate.spoken[member.device_id] = None
            effects.append(Discard(update.handle))
            return weight, effects + self.fold_if_due(now_s)
        self.gathering.add(
            Contribution(
                handle=update.handle,
                device_id=member.device_id,
                weight=weight,
                norm=update.norm,
                examples=self.survey.credible_examples(measurements.examples or stats.examples),
                local_steps=stats.local_steps,
                staleness=measurements.staleness,
                score=measurements.score,
                arrived_s=now_s,
                voter=member.voter,
            )
        )
        state.electorate.spoken.pop(member.device_id, None)
        state.divergence.counted[member.device_id] = None
        effects += self.fold_if_due(now_s)
        waiting = len(state.gathering.contributions)
        return Buffered(waiting) if waiting else Applied(state.version), effects

    def _look_at_fleet(self, now_s: float) -> list[HubEffect]:
        """Survey the fleet, and adapt its cadence."""
        state = self.state
        state.fleet.note_peaks(self.electorate.voters_live)
        self.divergence.keep_only(self._members.members)
        sample, measurements = self.survey.take(state.fleet, state.version, state.updates_applied)
        self.pacing.retune(sample, measurements, now_s)
        return self.pacing.judge(now_s)

    def _count_rejected(self, device_id: str, reason: str) -> None:
        """Count a rejected update in the total and in its device's count."""
        self.state.updates_rejected += 1
        if (member := self._members.members.get(device_id)) is not None:
            member.updates_rejected[reason] = member.updates_rejected.get(reason, 0) + 1
            self._members.note_change(member)

    def drop_updates(self, device_id: str, reason: str) -> list[HubEffect]:
        """Drop a device's buffered updates, and record `reason` as their outcome."""
        handles = self.gathering.drop(device_id)
        for _ in handles:
            self._count_rejected(device_id, reason)
        return [Discard(handle) for handle in handles]

    # -- a version is made -----------------------------------------------------------------------------------

    def fold_if_due(self, now_s: float) -> list[HubEffect]:
        """If a fold is due, create the next version from all buffered updates."""
        due_s = self.gathering.due_s(now_s)
        return [] if due_s is None or due_s > now_s else self.fold(now_s)

    def fold(self, now_s: float) -> list[HubEffect]:
        """Create the next version from all buffered updates.

        If an evaluation is due, request it.
        """
        state = self.state
        contributions, fold = self.gathering.fold(self.learning_rate_factor)
        self._advance()
        effects: list[HubEffect] = [fold]
        effects += self.in_force.count(contributions, state.survey.examples_total)
        if self.divergence.count_folded(len(contributions), state.survey.devices):
            effects.append(Keep())
        return effects + self._evaluate_if_due(len(contributions), now_s)

    def _advance(self) -> None:
        self.state.version += 1
        self.state.electorate.spoken.clear()

    def _roll_back(self, fault: Fault) -> list[HubEffect]:
        """Restore the kept version under a new number.

        Buffered updates are dropped, and later updates that are based on an earlier version are
        rejected. If a first update corrupted the model, the usual norm is known by now, and the hub
        keeps it. Without a usual norm, the device's next update would not be clipped, and would
        corrupt the model again.
        """
        state = self.state
        dropped = self.gathering.take()
        for one in dropped:
            self._count_rejected(one.device_id, ROLLED_BACK)
        self.gathering.rolled_back()
        self.divergence.rolled_back()
        state.fleet.forget(keeps_lengths=fault == "first")
        self._advance()
        state.version_oldest = state.version
        return [*[Discard(one.handle) for one in dropped], Restore(state.version)]

    # -- evaluations -----------------------------------------------------------------------------------------

    def _evaluate_if_due(self, updates: int, now_s: float) -> list[HubEffect]:
        """Count applied updates.

        If an evaluation is due, request it. Without held-out data, use the devices' losses instead.
        """
        before, evaluations = self.state.updates_applied, self.state.evaluations
        self.state.updates_applied += updates
        every_updates, every_s = self._evaluated_every
        passed_s = now_s - evaluations.begun_s
        due = self.state.updates_applied // every_updates != before // every_updates or passed_s >= every_s
        if not due and not (self.state.rest.resting and passed_s >= EVALUATED_AT_REST_S):
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
        """Whether the newest version must be evaluated, because the hub has not done so yet.

        Evaluations from before the hub's last start do not count.
        """
        state, last = self.state, self.state.evaluations.last
        # The evaluation data may have changed at the restart.
        resumed = max(state.ancestry.shared.values(), default=-1)
        known = last is not None and resumed < last.number == state.version
        return self._settings.held_out and not known

    def observe_evaluation(self, evaluation: Evaluated, now_s: float) -> list[HubEffect]:
        """Compare an evaluation with earlier evaluations."""
        before = self.learning_rate_factor
        effects = self.evaluations.observe(evaluation, self.state.updates_applied, now_s)
        lowered = self.learning_rate_factor < before
        return effects + self.pacing.observe_evaluation(evaluation, now_s, rate_lowered=lowered)

    # -- departures and operators' orders --------------------------------------------------------------------

    def forget(self, member: Member) -> None:
        """Drop the vote and the reports of a device that has left.

        If another device of the same voter is live, the voter's reports are kept. Alarms, orders
        and measurements of the device's data are kept, too, so that a device cannot reset them by a
        restart.
        """
        self.state.electorate.spoken.pop(member.device_id, None)
        self.electorate.forget_infrequent(member.device_id)
        self.withdraw(member.voter)

    def pause(self, member: Member) -> None:
        """Record that a device has paused.

        No version waits for it, and its link is not measured.
        """
        member.assigned = None
        self.electorate.forget_infrequent(member.device_id)

    def withdraw(self, voter: str) -> None:
        """Drop a voter's reports about the model if none of its devices is live."""
        if voter not in self._members.voters:
            self.state.fleet.withdraw(voter)

    def revoke(self, member: Member, now_s: float) -> None:
        """Drop an expelled member's votes if its voter has no other live device."""
        self.divergence.revoke(member.voter, member.device_id, now_s)
        if member.voter not in self._members.voters:
            self.state.fleet.revoke(member.voter)

    def voter_of(self, device_id: str) -> str | None:
        """Return the voter to which a device belongs, or `None` if it is unknown.

        The voter of an evicted device is known only while there is an order or an alarm about the
        device.
        """
        member = self._members.members.get(device_id)
        return self.divergence.voter_of(device_id) if member is None else member.voter

    def quarantine(self, voter: str, device_id: str, now_s: float) -> list[HubEffect]:
        """Exclude a device and its voter by an operator's order.

        Return no effects if the device is already excluded. No version waits for excluded devices.
        """
        effects = self.divergence.order(voter, device_id, now_s)
        if not effects:
            return []
        state, members = self.state, self._members.members
        state.fleet.revoke(voter)
        for name in [name for name in state.electorate.infrequent if members[name].voter == voter]:
            self.electorate.forget_infrequent(name)
        waiting = state.gathering.contributions
        for name in dict.fromkeys([one.device_id for one in waiting if one.voter == voter]):
            effects += self.drop_updates(name, QUARANTINED)
        return effects + self.fold_if_due(now_s)

    def is_quarantined(self, member: Member) -> bool:
        """Return whether an operator excluded the device or another device with the same key."""
        return member.voter in self.state.divergence.orders

    # -- status and checks -----------------------------------------------------------------------------------

    def describe(self, devices: Sequence[DeviceMeasurements] = ()) -> dict[str, Any]:
        """Return the policies' fields of a `HubStatus`.

        `period_s` is the median of the exchange periods of `devices`, without infrequent devices.
        `aim_s` is the controller's target for this period. Configured bounds may prevent devices
        from reaching it.
        """
        state = self.state
        fleet = state.fleet
        return {
            "cadence": self.pacing.describe(devices),
            "fleet": FleetStatus(
                staleness_mean=round(fleet.staleness_mean, 3),
                agreement=json_number(fleet.agreement),
                loss=json_number(fleet.loss),
                loss_variance=json_number(fleet.loss_variance),
            ),
            "learning_rate_factor": self.learning_rate_factor,
            "rollbacks": state.divergence.rollbacks,
            "evaluation": describe_evaluation(state.evaluations.last),
            "best": describe_evaluation(state.evaluations.best),
        }

    def check(self) -> None:
        """Raise `AssertionError` if the counts are inconsistent."""
        self.gathering.check()
        assert self.state.updates_applied >= self.state.warm_up.updates


def json_number(value: float) -> float | None:
    """Round a number to six digits for JSON; return `None` if it is infinite or NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def describe_evaluation(evaluated: Evaluated | None) -> EvaluationStatus | None:
    """Return an evaluation for the status."""
    if evaluated is None:
        return None
    return EvaluationStatus(
        version=evaluated.number, loss=json_number(evaluated.loss), accuracy=evaluated.accuracy
    )
