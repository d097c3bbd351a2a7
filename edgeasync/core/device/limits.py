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
    """Never more local steps between two exchanges. The agent tells the hub. Without it: 1 000 000."""
    delay_steps: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    """The agent uses the answer to an update exactly this many local steps after it has sent the update, and
    trains meanwhile; if the answer is not there by then, it waits. 0: it waits at once. At most `local_steps_max`,
    and never more than the update had. Without this key: as the hub's `delay_steps` says. With it the agent takes
    no steps alone.
    """
    graph_bytes_max: ByteCount = ByteCount(64 << 20)
    """The agent refuses a hub that ships a larger training graph, exit code 10."""
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] | None = None
    """The agent refuses a hub whose model has more values, exit code 5. Without this key: as many as fit into this
    machine's memory at 16 bytes each.
    """
    bandwidth_bytes_per_s_max: ByteCount | None = None
    """The most bytes a second, of all messages of this agent in both directions. Over ten seconds the agent may
    exceed the cap by two pieces of 64 KiB: little at 1 MB/s, more at a very low cap. The headers of TCP and IP,
    some 4 %, do not count.
    """
    link_share: Annotated[float, Meta(ge=0.01, lt=1)] | None = None
    """The share of the link, as the agent measures it, that its messages may take, both directions together: [A
    share of the link](/devices/network.md#a-share-of-the-link). With `bandwidth_bytes_per_s_max` the lower one
    holds.
    """
    bytes_per_day_max: ByteCount | None = None
    """The most bytes of 24 hours, of all messages of this agent in both directions: [Bytes of a
    day](/devices/network.md#bytes-of-a-day). Of this limit and the hub's the lower one counts. The agent keeps to
    it whatever the hub sends.
    """
    alone_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """The most local steps beyond the assignment, while the agent reaches no hub or the hub accepts no updates; 0:
    the device pauses. The agent merges what these steps learnt with the next model, and sends it in the next
    update. If the hub sets `overlap_steps_max`, the larger of the two holds. It costs one more vector as long as
    the model.
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
