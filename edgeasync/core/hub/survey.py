"""A periodic survey of the fleet: its data, its best score, and whether it still learns."""

import math

from edgeasync.core.hub.member import Member
from edgeasync.core.hub.membership import SAMPLE, Membership
from edgeasync.core.hub.policy_state import SurveyState
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.measurements.fleet import FleetMeasurements
from edgeasync.measurements.medians import median
from edgeasync.measurements.votes import DEVICES_MIN
from edgeasync.policies.budget import EXCHANGES_UNCHANGED, has_changed

EXAMPLES_RATIO_MAX = 10.0
"""A device's number of examples counts only up to this multiple of the fleet's median."""


class Survey:
    """Surveys the fleet or, if the fleet is large, a sample of it.

    After a survey, the next one is due when the hub has processed half as many updates as the
    sample has devices.
    """

    def __init__(self, members: Membership, state: SurveyState) -> None:
        self.state = state
        self._members = members

    def take(
        self, fleet: FleetMeasurements, turn: int, updates_applied: int
    ) -> tuple[list[Member], list[DeviceMeasurements]]:
        """Survey the fleet.

        Return the sampled members, and the measurements of one member per voter.
        """
        state, devices_live = self.state, self._members.live_count
        sample = self._members.sample(turn)
        measurements = self._members.live_measurements(sample)
        state.devices = devices_live
        state.due_in = max(1, min(devices_live, SAMPLE) // 2)
        least = fleet.scores.least_credible
        scores = [one.score for one in measurements if one.counted and one.score >= least]
        state.score_best = min(scores, default=math.inf)
        with_data = [one.examples for one in measurements if one.examples]
        state.examples_median = float(median(with_data)) if len(with_data) >= DEVICES_MIN else 0.0
        with_data = [self.credible_examples(examples) for examples in with_data]
        state.examples_total = float(sum(with_data) * self._members.stride)
        loss = fleet.loss
        if not math.isnan(loss) and has_changed(loss, state.loss_mark, fleet.loss_first):
            state.loss_mark, state.loss_mark_updates = loss, updates_applied
        return sample, measurements

    def credible_examples(self, told: int) -> int:
        """Limit a device's reported number of examples to a multiple of the fleet's median."""
        most = EXAMPLES_RATIO_MAX * self.state.examples_median
        return min(told, int(most)) if most else told

    def is_learning(self, updates_applied: int) -> bool:
        """Return whether the losses of the devices changed recently or are unknown."""
        unchanged = updates_applied - self.state.loss_mark_updates
        return math.isinf(self.state.loss_mark) or unchanged < EXCHANGES_UNCHANGED * self._members.live_count
