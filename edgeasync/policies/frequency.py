"""Frequency controllers: how many local steps a device takes before it speaks again."""

from collections.abc import Mapping
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from edgeasync.config import Section

EXAMPLES_RATE_WEIGHT = 0.3
"""Weight of the newest measurement in a device's moving average of examples per second."""


class DeviceHistory(msgspec.Struct):
    """What the hub has measured of one device; the last values, 0 before the first update."""

    examples: int = 0
    local_steps: int = 0
    staleness: int = 0
    step_s: float = 0.0
    examples_per_s: float = 0.0
    loss_mean: float = 0.0
    loss_variance: float = 0.0
    updates: int = 0

    def observe(
        self, *, local_steps: int, examples: int, step_s: float, loss_mean: float, loss_variance: float
    ) -> None:
        """Take in what an update said of its local steps."""
        self.local_steps = local_steps
        self.step_s = step_s
        self.loss_mean = loss_mean
        self.loss_variance = loss_variance
        self.updates += 1
        if step_s > 0:
            # No step takes less than a nanosecond; whoever says so must not drive the average to infinity.
            rate = examples / (local_steps * max(step_s, 1e-9))
            share = EXAMPLES_RATE_WEIGHT if self.examples_per_s else 1.0
            self.examples_per_s += (rate - self.examples_per_s) * share


class FrequencyController(Protocol):
    """A callable from what is known of the fleet to one device's next number of local steps (1 or more)."""

    def __call__(self, device_id: str, histories: Mapping[str, DeviceHistory]) -> int:
        """Return the local steps of the next assignment for `device_id`."""


class FixedFrequency(Section, frozen=True, tag_field="kind", tag="fixed"):
    """The same number of local steps for every device, always."""

    local_steps: Annotated[int, Meta(ge=1, le=100_000)] = 16

    def __call__(self, device_id: str, histories: Mapping[str, DeviceHistory]) -> int:  # noqa: ARG002
        """Return `local_steps`."""
        return self.local_steps
