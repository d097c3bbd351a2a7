"""Limits of a device's work and traffic, for its core and engine."""

from typing import Annotated

from msgspec import Meta

from edgeasync.config import ByteCount, Section
from edgeasync.core.device.data_quota import BYTES_PER_DAY_MIN
from edgeasync.parameters import PARAMETERS_MAX
from edgeasync.protocol.messages import COUNT_MAX

BANDWIDTH_BYTES_PER_S_MIN = 1 << 14
"""Minimum bandwidth cap. Sending one piece then takes 4 s, which is less than the default lease."""


class DeviceLimits(Section, frozen=True):
    """`[limits]` of an agent: how much work and traffic a device accepts."""

    local_steps_max: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Maximum number of local steps between two exchanges. The agent reports it to the hub. By
    default, only the hub's limit applies.
    """
    delay_steps: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    """Number of local steps to take after an update before using the hub's answer. With 0, the
    agent waits for the answer. Otherwise, it continues to train, and waits only if the answer
    arrives after these steps. The value may be at most `local_steps_max`, and the agent never takes
    more of these steps than the update contained. The default is the hub's `delay_steps`. If this
    is set, the agent does not train while no hub is reachable.
    """
    graph_bytes_max: ByteCount = ByteCount(64 << 20)
    """Size of the largest training graph that this device accepts. If the hub's graph is larger,
    the agent ends with exit code 10.
    """
    base_cache_bytes_max: ByteCount = ByteCount(2 << 30)
    """Maximum size of the cache for [bases](/devices/network.md#the-base-of-a-model), which all agents of this
    user share. If a new base does not fit, the agent deletes the least recently used ones that no
    agent uses. If the hub's base alone is larger, the agent ends with exit code 10.
    """
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] | None = None
    """Maximum number of values in a model that this device accepts. If the hub's model is larger,
    the agent ends with exit code 5. By default, as many as fit into this machine's memory at 16
    bytes each.
    """
    bandwidth_bytes_per_s_max: ByteCount | None = None
    """Maximum bytes per second in both directions together, such as `1 MB`; at least 16 KiB. Within
    any ten seconds, the agent may exceed the cap by two pieces of 64 KiB. That is negligible at 1
    MB/s, but noticeable at a very low cap. The headers of TCP and IP, about 4 %, do not count.
    """
    link_share: Annotated[float, Meta(ge=0.01, lt=1)] | None = None
    """Maximum share of the link's bandwidth, in both directions together. The agent measures the
    bandwidth: [A share of the link](/devices/network.md#a-share-of-the-link). If
    `bandwidth_bytes_per_s_max` is also set, the lower limit applies.
    """
    bytes_per_day_max: ByteCount | None = None
    """Daily quota for both directions together, such as `20 MB`; at least 128 KiB. If the hub has a
    quota too, the lower one applies. The agent enforces its quota regardless of what the hub sends:
    [Bytes of a day](/devices/network.md#bytes-of-a-day).
    """
    alone_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Maximum number of extra local steps while no hub is reachable; with 0, the device pauses. The
    agent adds the result of these steps to the next model that it receives, and includes the result
    in its next update. If the hub sets `overlap_steps_max`, the larger of the two limits applies.
    This needs memory for one more vector of the model's size.
    """

    def __post_init__(self) -> None:
        bandwidth, day_bytes = self.bandwidth_bytes_per_s_max, self.bytes_per_day_max
        if bandwidth is not None and bandwidth < BANDWIDTH_BYTES_PER_S_MIN:
            raise ValueError(
                "bandwidth_bytes_per_s_max must be at least 16 KiB, so that sending a piece of 64 KiB does not "
                "take longer than the hub's lease"
            )
        if self.local_steps_max is not None and (self.delay_steps or 0) > self.local_steps_max:
            raise ValueError(
                f"delay_steps ({self.delay_steps}) must be at most local_steps_max ({self.local_steps_max}), "
                "because a device has only one unanswered update at a time"
            )
        if day_bytes is not None and not BYTES_PER_DAY_MIN <= day_bytes <= COUNT_MAX:
            raise ValueError("bytes_per_day_max must be from 128 KiB to 9007199 GB")
