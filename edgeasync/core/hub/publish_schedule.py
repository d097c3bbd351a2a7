"""Decides when the newest version is published. Part of `HubCore`."""

import msgspec

from edgeasync.core.hub.effects import HubEffect, Publish
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.policies.policy import folds_one_by_one

PER_PERIOD = 4.0
"""How many versions are published per exchange period if every update creates a version."""


class PublishState(msgspec.Struct):
    """The published version's number and time, and the number of rollbacks before it."""

    number: int
    published_s: float
    rollbacks: int = 0


class PublishSchedule:
    """Decides when to publish the newest version. Handles scalars only."""

    def __init__(self, settings: CodecSettings, number: int, now_s: float) -> None:
        self.state = PublishState(number, now_s)
        self._settings = settings

    def follow(self, policy_engine: PolicyEngine, now_s: float) -> list[HubEffect]:
        """Publish the newest version if it is due.

        If every update creates a version, a minimum time must pass between two publications.
        """
        state, version = self.state, policy_engine.state.version
        if state.number == version:
            return []
        if self._settings.delta == "off":
            state.number = version
            return []
        rollbacks = policy_engine.divergence.state.rollbacks
        leapt = rollbacks != state.rollbacks
        wait_s = self._settings.publish_s or policy_engine.state.cadence.period_s / PER_PERIOD
        if not leapt and folds_one_by_one(policy_engine.in_force.aggregate) and now_s < state.published_s + wait_s:
            return []
        state.number, state.published_s, state.rollbacks = version, now_s, rollbacks
        return [Publish(version, whole=leapt)]
