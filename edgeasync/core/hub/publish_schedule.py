"""When the published model follows the model. Part of `HubCore`; scalars only."""

import msgspec

from edgeasync.core.hub.effects import HubEffect, Publish
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.policies.policy import folds_one_by_one

PER_PERIOD = 4.0
"""Where every update is a version, the published model moves so often between two exchanges of a device."""


class PublishScheduleState(msgspec.Struct):
    """What is durable of `PublishSchedule`."""

    number: int
    published_s: float
    rollbacks: int


class PublishSchedule:
    """The `number` of the version that devices are given."""

    def __init__(self, settings: CodecSettings, number: int, now_s: float) -> None:
        self.number = number
        self._settings = settings
        self._published_s = now_s
        self._rollbacks = 0

    def dump_state(self) -> PublishScheduleState:
        """Return the durable state."""
        return PublishScheduleState(self.number, self._published_s, self._rollbacks)

    def load_state(self, state: PublishScheduleState) -> None:
        """Load a durable state."""
        self.number, self._published_s, self._rollbacks = state.number, state.published_s, state.rollbacks

    def follow(self, policy_engine: PolicyEngine, now_s: float, effects: list[HubEffect]) -> None:
        """Publish the newest version, unless every update is a version of its own and it is too soon."""
        if self.number == policy_engine.version:
            return
        if self._settings.delta != "off":
            anew = policy_engine.divergence.rollbacks != self._rollbacks
            wait_s = self._settings.publish_s or policy_engine.cadence.period_s / PER_PERIOD
            too_soon = folds_one_by_one(policy_engine.aggregate) and now_s < self._published_s + wait_s
            if too_soon and not anew:
                return
            self._rollbacks, self._published_s = policy_engine.divergence.rollbacks, now_s
            effects.append(Publish(policy_engine.version, anew))
        self.number = policy_engine.version
