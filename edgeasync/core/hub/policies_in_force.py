"""The active policies, with or without warm-up. Part of `PolicyEngine`."""

import math
from collections.abc import Sequence
from itertools import islice

from edgeasync.core.hub.effects import HubEffect, HubReport
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.policy_state import WarmUpState
from edgeasync.measurements.medians import WINDOW, median
from edgeasync.measurements.votes import DEVICES_MIN
from edgeasync.policies.aggregation import Aggregator, Contribution
from edgeasync.policies.frequency import AdaptiveFrequency, FrequencyController
from edgeasync.policies.policy import PolicySet


class PoliciesInForce:
    """Selects the active policies, and counts folded updates until the warm-up ends.

    `aggregate` and `frequency` are the policies that are active now.
    """

    def __init__(self, policy: PolicySet, members: Membership, state: WarmUpState, *, quiet: bool) -> None:
        self.policy = policy
        self._members = members
        self._quiet = quiet
        self.load_state(state)

    def load_state(self, state: WarmUpState) -> None:
        """Resume from a durable state. From then on, this object owns it."""
        self.state = state
        self._enforce()

    def _enforce(self) -> None:
        policy = self.policy
        part = policy if self.state.over or policy.warm_up is None else policy.warm_up
        self.aggregate: Aggregator = part.aggregate
        self.frequency: FrequencyController = part.frequency
        frequency = part.frequency if self._quiet else None
        self.adaptive = frequency if isinstance(frequency, AdaptiveFrequency) else None
        """The active frequency controller if it allows the fleet to go idle, else `None`."""

    def count(self, contributions: Sequence[Contribution], examples_total: float) -> list[HubEffect]:
        """Count folded updates until the warm-up ends.

        `examples_total` is the number of examples per epoch, summed over the reports of all
        devices.
        """
        state, warm_up = self.state, self.policy.warm_up
        state.updates += len(contributions)
        if state.over or warm_up is None:
            return []
        if warm_up.epochs:
            state.examples_seen += self._examples_trained(contributions)
        # Without reported examples, epochs cannot be counted, so the warm-up ends.
        epochs = state.examples_seen / examples_total if examples_total else math.inf
        state.over = state.updates >= warm_up.updates if warm_up.updates else epochs >= (warm_up.epochs or 0.0)
        if not state.over:
            return []
        self._enforce()
        return [HubReport("warm", detail=f"the warm-up ended after {state.updates} updates")]

    def _examples_trained(self, contributions: Sequence[Contribution]) -> float:
        """Return the number of examples on which these updates were trained.

        For each step, at most the median batch size of the voters is counted, because reported
        sizes are not trustworthy. To limit the cost, only the first `WINDOW` devices are included.
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
