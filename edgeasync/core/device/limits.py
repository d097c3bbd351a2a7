"""Limits of a device's work and traffic, for its core and engine."""

from typing import Annotated

from msgspec import Meta

from edgeasync.config import ByteCount, Section
from edgeasync.core.device.data_quota import BYTES_PER_DAY_MIN
from edgeasync.parameters import PARAMETERS_MAX
from edgeasync.protocol.messages import COUNT_MAX

BANDWIDTH_BYTES_PER_S_MIN = 1 << 14
"""Below this cap, a single piece would take longer than the hub's lease."""


class DeviceLimits(Section, frozen=True):
    """`[limits]` of an agent: the most that a device does, accepts and sends."""

    local_steps_max: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Maximum local steps between two exchanges. The agent reports it to the hub. By default only
    the hub's limit applies.
    """
    delay_steps: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    """Local steps after an update before its answer is used; with 0 the agent waits for the answer.
    The agent trains meanwhile, and waits if the answer is late. At most `local_steps_max`, and
    never more than the update had. The default is the hub's `delay_steps`. With this setting the
    agent takes no steps without a hub.
    """
    graph_bytes_max: ByteCount = ByteCount(64 << 20)
    """Largest training graph that this device accepts. If the hub's graph is larger, the agent ends
    with exit code 10.
    """
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] | None = None
    """Largest number of values of a model that this device accepts. If the hub's model is larger,
    the agent ends with exit code 5. By default as many as fit into this machine's memory at 16
    bytes each.
    """
    bandwidth_bytes_per_s_max: ByteCount | None = None
    """Maximum bytes per second, both directions together, such as `1 MB`; at least 16 KiB. Over ten
    seconds the agent may exceed the cap by two pieces of 64 KiB: little at 1 MB/s, more at a very
    low cap. The headers of TCP and IP, some 4 %, do not count.
    """
    link_share: Annotated[float, Meta(ge=0.01, lt=1)] | None = None
    """Maximum share of the link's bandwidth, both directions together. The agent measures the link:
    [A share of the link](/devices/network.md#a-share-of-the-link). With
    `bandwidth_bytes_per_s_max`, the lower limit applies.
    """
    bytes_per_day_max: ByteCount | None = None
    """Daily quota, both directions together, such as `20 MB`; at least 128 KiB. The lower one of
    this and the hub's quota applies. The agent enforces it whatever the hub sends: [Bytes of a
    day](/devices/network.md#bytes-of-a-day).
    """
    alone_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Maximum extra local steps while no hub is reachable; with 0 the device pauses. The agent
    merges the result of these steps with the next model, and sends it in the next update. If the
    hub sets `overlap_steps_max`, the larger limit applies. It needs memory for one more vector of
    the model's size.
    """

    def __post_init__(self) -> None:
        bandwidth, day_bytes = self.bandwidth_bytes_per_s_max, self.bytes_per_day_max
        if bandwidth is not None and bandwidth < BANDWIDTH_BYTES_PER_S_MIN:
            raise ValueError("bandwidth_bytes_per_s_max must be at least 16 KiB, because a piece has 64 KiB")
        if self.local_steps_max is not None and (self.delay_steps or 0) > self.local_steps_max:
            raise ValueError(
                f"delay_steps ({self.delay_steps}) must be at most local_steps_max ({self.local_steps_max}), "
                "because a device has only one unanswered update at a time"
            )
        if day_bytes is not None and not BYTES_PER_DAY_MIN <= day_bytes <= COUNT_MAX:
            raise ValueError("bytes_per_day_max must be from 128 KiB to 9007199 GB")
