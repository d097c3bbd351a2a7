"""Sets the cadence, the number of local steps, and idle times. Part of `PolicyEngine`."""

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from edgeasync.core.hub.divergence import DivergenceGuard
from edgeasync.core.hub.effects import Broadcast, HubEffect, HubReport
from edgeasync.core.hub.electorate import Electorate
from edgeasync.core.hub.events import Evaluated
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.policies_in_force import PoliciesInForce
from edgeasync.core.hub.policy_state import PolicyEngineState
from edgeasync.core.hub.rest import MEASURED_UPDATES, NEW_UPDATES, ROUSED_UPDATES, Rest
from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.measurements.device import DeviceMeasurements
from edgeasync.policies.frequency import AdaptiveFrequency, Interval
from edgeasync.policies.monitor import STEPS_FACTOR
from edgeasync.protocol.messages import Refuse
from edgeasync.protocol.status import CadenceStatus

RESTING = 2.0
"""The hub reports a fleet as idle once the exchange period exceeds the normal one by this
factor.
"""


class Pacing:
    """Sets the number of local steps of a device, and how long it idles before them.

    With an adaptive frequency controller, the fleet goes idle when training plateaus: its devices
    then exchange less often.
    """

    def __init__(
        self,
        in_force: PoliciesInForce,
        electorate: Electorate,
        divergence: DivergenceGuard,
        settings: HubCoreSettings,
        state: PolicyEngineState,
    ) -> None:
        self.rest = Rest()
        self._in_force = in_force
        self._divergence = divergence
        self._electorate = electorate
        self._members = electorate.members
        self._settings = settings
        self.load_state(state)

    def load_state(self, state: PolicyEngineState) -> None:
        """Resume from a durable state."""
        self.state = state
        self.rest.state = state.rest

    # -- the cadence -----------------------------------------------------------------------------------------

    def retune(self, sample: list[Member], measurements: Sequence[DeviceMeasurements], now_s: float) -> None:
        """Adapt the cadence to the fleet, based on a sample of its devices."""
        state, adaptive = self.state, self._in_force.adaptive
        retune = self._in_force.frequency.retune if adaptive is None else adaptive.retune_quietly
        active = [one for one in measurements if one.updates]
        cadence = retune(state.cadence, state.fleet, active)
        # Use a quota's longer period only if more than half of the devices need it.
        rests_s = sorted([one.period_s_min for one in active])
        if rests_s and (rest_s := rests_s[(len(rests_s) - 1) // 2]) > cadence.period_s:
            cadence = msgspec.structs.replace(cadence, period_s=rest_s)
        state.cadence = cadence
        self._electorate.note_infrequent(sample, cadence, now_s)

    def assign_steps(self, measurements: DeviceMeasurements) -> int:
        """Set and return the local steps of a device's next assignment."""
        cadence, adaptive = self.state.cadence, self._in_force.adaptive
        steps_factor = STEPS_FACTOR if self._divergence.is_active("increase_frequency") else 1.0
        if cadence.steps_factor != steps_factor:
            cadence = msgspec.structs.replace(cadence, steps_factor=steps_factor)
        if adaptive is not None and not adaptive.rest and not _keeps_pace(measurements):
            cadence = msgspec.structs.replace(cadence, period_s=self._stretched_s(adaptive))
        interval: Interval = self._in_force.frequency.interval(measurements, cadence)
        measurements.assigned_steps, measurements.why = interval.local_steps, interval.why
        measurements.bound = interval.bound
        return interval.local_steps

    # -- idling ----------------------------------------------------------------------------------------------

    def rest_s(self, member: Member, now_s: float) -> float:
        """Return how many seconds a device must idle before its next assignment."""
        adaptive = self._in_force.adaptive
        if adaptive is None or not self.rest.state.resting or _keeps_pace(member.measurements):
            return 0.0
        return member.assigned_s + self._stretched_s(adaptive) - now_s

    def _stretched_s(self, adaptive: AdaptiveFrequency) -> float:
        return self.rest.period_s(self.state.cadence.period_s, adaptive.period_s_max)

    def note_update(self, member: Member, now_s: float) -> list[HubEffect]:
        """Check whether an update brings new data.

        The data of a device may have changed, or the update may come from a new voter.
        """
        if self._in_force.adaptive is None:
            return []
        measurements = member.measurements
        if self.rest.has_news(measurements.base_losses):
            measurements.roused = ROUSED_UPDATES
        elif measurements.roused:
            measurements.roused -= 1
        if measurements.updates != NEW_UPDATES:
            return []
        woken = self.rest.joined(member.voter, member.device_id, measurements.base_losses, now_s)
        return self._rouse(now_s) if woken else []

    def judge(self, now_s: float) -> list[HubEffect]:
        """Check by the devices' reports whether the model improves.

        If the fleet goes idle, report it.
        """
        if (adaptive := self._in_force.adaptive) is None:
            return []
        rest, state, held_out = self.rest, self.state, self._settings.held_out
        pace_s, losses = state.cadence.period_s, state.fleet.base_losses
        if losses.newest:
            woken = rest.told(losses, self._electorate.voters_live, now_s, pace_s, judges=not held_out)
        else:
            woken = not held_out and rest.moved(state.fleet.agreement, now_s, pace_s)
        effects = self._rouse(now_s) if woken else []
        period_s = self._stretched_s(adaptive)
        if rest.state.resting or period_s < RESTING * pace_s:
            return effects
        rest.state.resting = True
        still = f"training has plateaued for {rest.still_s:.0f} s"
        return [*effects, HubReport("resting", detail=f"{still}; devices exchange less often now")]

    def observe_evaluation(self, evaluation: Evaluated, now_s: float, *, rate_lowered: bool) -> list[HubEffect]:
        """Check by an evaluation whether the model improves.

        If the learning rate was lowered, the model may now improve, so shorten the recorded
        plateau.
        """
        if self._in_force.adaptive is None:
            return []
        pace_s = self.state.cadence.period_s
        if rate_lowered:
            self.rest.nudge(now_s, pace_s)
        if not self._settings.held_out:
            return []
        woken = self.rest.evaluated(evaluation.loss, evaluation.accuracy, now_s, pace_s)
        return self._rouse(now_s) if woken else []

    def wake(self, cause: str, now_s: float) -> list[HubEffect]:
        """Return the fleet to its normal pace, because of `cause`."""
        return self._rouse(now_s) if self.rest.wake(cause, now_s) else []

    def _rouse(self, now_s: float) -> list[HubEffect]:
        """Notify idle devices that they should soon request an assignment."""
        resting = [member for member in self._members.members.values() if member.rest_until_s > now_s]
        for member in resting:
            member.rest_until_s = now_s
        peers = tuple([member.peer for member in resting if member.live and member.peer])
        refuse = Refuse("busy", "the fleet returns to its normal pace", self._settings.limits.retry_after_s)
        return [HubReport("awake", detail=self.rest.state.cause), Broadcast(peers, refuse)]

    # -- status ----------------------------------------------------------------------------------------------

    def describe(self, devices: Sequence[DeviceMeasurements]) -> CadenceStatus:
        """Return the cadence for the status; see `PolicyEngine.describe`."""
        cadence, rest, adaptive = self.state.cadence, self.rest, self._in_force.adaptive
        measured = [device for device in devices if device.step_s]
        usual = [one.period_s or one.cycle_s for one in measured if not cadence.is_infrequent(one)]
        bounds = Counter(device.bound for device in measured if device.bound)
        bound = bounds.most_common(1)[0][0] if 2 * bounds.total() >= len(measured) > 0 else ""
        resting = rest.state.resting
        return CadenceStatus(
            period_s=round(statistics.median(usual) if usual else 0.0, 6),
            aim_s=round(cadence.period_s, 6),
            bound=bound,
            gain=round(cadence.gain, 3),
            cause=cadence.cause if cadence.gain < 1.0 else "",
            warming_up=not self.state.warm_up.over,
            resting=resting,
            rest_period_s=round(self._stretched_s(adaptive), 6) if adaptive and resting else 0.0,
            still_s=round(rest.still_s, 3) if adaptive else 0.0,
            rest_cause=rest.state.cause,
        )


def _keeps_pace(measurements: DeviceMeasurements) -> bool:
    """Return whether a device must not idle now, because it is new or its own loss has risen."""
    return measurements.roused > 0 or measurements.updates < MEASURED_UPDATES
