"""Frequency controllers: how many local steps a device takes before it speaks again."""

from collections.abc import Mapping
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from edgeasync.config import Section


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
