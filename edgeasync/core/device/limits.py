"""The limits of a device's work and traffic, as its core and engine keep to them."""

from typing import Annotated

from msgspec import Meta

from edgeasync.config import ByteCount, Section
from edgeasync.core.device.data_quota import BYTES_PER_DAY_MIN
from edgeasync.parameters import PARAMETERS_MAX
from edgeasync.protocol.messages import COUNT_MAX

BANDWIDTH_BYTES_PER_S_MIN = 1 << 14
"""Under a lower cap a single piece would take longer than the hub waits for a sign of life."""


class DeviceLimits(Section, frozen=True):
    """`[limits]` of an agent: the most that a device does, accepts and sends.

    - `local_steps_max`: the most local steps between two exchanges; `None` is no limit.
    - `delay_steps`: after how many steps the answer to an update is used, if not as the hub says.
    - `alone_steps_max`: the most extra local steps while no hub can be reached.
    - `graph_bytes_max`: the largest training graph. `parameters_max`: the most values of a model.
    - `bandwidth_bytes_per_s_max`: the cap on all traffic, both directions together. `link_share`: the share of the
      link, as it is measured, that all traffic may take. `bytes_per_day_max`: the bytes of 24 hours.
    """

    local_steps_max: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    delay_steps: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    graph_bytes_max: ByteCount = ByteCount(64 << 20)
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] | None = None
    bandwidth_bytes_per_s_max: ByteCount | None = None
    link_share: Annotated[float, Meta(ge=0.01, lt=1)] | None = None
    bytes_per_day_max: ByteCount | None = None
    alone_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0

    def __post_init__(self) -> None:
        bandwidth, day_bytes = self.bandwidth_bytes_per_s_max, self.bytes_per_day_max
        if bandwidth is not None and bandwidth < BANDWIDTH_BYTES_PER_S_MIN:
            raise ValueError("bandwidth_bytes_per_s_max must be at least 16 KiB: a piece has 64 KiB")
        if self.local_steps_max is not None and (self.delay_steps or 0) > self.local_steps_max:
            raise ValueError(
                f"delay_steps is {self.delay_steps}, over local_steps_max, {self.local_steps_max}: a device has "
                "one unanswered update at a time, so that each counts exactly once; give at most as many"
            )
        if day_bytes is not None and not BYTES_PER_DAY_MIN <= day_bytes <= COUNT_MAX:
            raise ValueError("bytes_per_day_max must be at least 128 KiB, and at most 9007199 GB")
