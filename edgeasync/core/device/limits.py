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
    """`[limits]` of an agent: the most that a device does, accepts and sends."""

    local_steps_max: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Most local steps between two exchanges. The agent tells the hub. By default only the hub's limit holds."""
    delay_steps: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    """Local steps from an update to the use of its answer; 0: wait at once. The agent trains meanwhile, and waits
    if the answer is not there by then. At most `local_steps_max`, and never more than the update had. By default
    as the hub's `delay_steps` says. With it the agent takes no steps alone.
    """
    graph_bytes_max: ByteCount = ByteCount(64 << 20)
    """Largest training graph that this device accepts. It leaves a hub that ships a larger one with exit code 10.
    """
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] | None = None
    """Most values of a model that this device accepts. It leaves a hub with a larger model with exit code 5. By
    default as many as fit into this machine's memory at 16 bytes each.
    """
    bandwidth_bytes_per_s_max: ByteCount | None = None
    """Most bytes a second, both ways together, such as `1 MB`; at least 16 KiB. Over ten seconds the agent may
    exceed the cap by two pieces of 64 KiB: little at 1 MB/s, more at a very low cap. The headers of TCP and IP,
    some 4 %, do not count.
    """
    link_share: Annotated[float, Meta(ge=0.01, lt=1)] | None = None
    """Most of the link that messages may take, both ways together, as a share. The agent measures the link: [A
    share of the link](/devices/network.md#a-share-of-the-link). With `bandwidth_bytes_per_s_max` the lower one
    holds.
    """
    bytes_per_day_max: ByteCount | None = None
    """Most bytes of 24 hours, both ways together, such as `20 MB`; at least 128 KiB. Of this limit and the hub's
    the lower one counts, and the agent keeps to it whatever the hub sends: [Bytes of a
    day](/devices/network.md#bytes-of-a-day).
    """
    alone_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Most extra local steps while no hub can be reached; 0: the device pauses. The agent merges what these steps
    learnt with the next model, and sends it in the next update. If the hub sets `overlap_steps_max`, the larger of
    the two holds. It costs one more vector as long as the model.
    """

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
