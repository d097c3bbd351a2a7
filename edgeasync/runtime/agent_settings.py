"""An agent's settings file as frozen structs. `docs/settings.md` lists every key.

Apart from a hub's, so that a device loads nothing of a hub.
"""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from edgeasync.config import ByteCount, Section, whole_address
from edgeasync.core.device.data_quota import BYTES_PER_DAY_MIN
from edgeasync.core.device.device_core import GRAPH_BYTES_MAX
from edgeasync.core.device.throttle import HYSTERESIS_C, ThrottleLimits
from edgeasync.parameters import PARAMETERS_MAX
from edgeasync.plugins import check_name
from edgeasync.protocol.messages import COUNT_MAX
from edgeasync.runtime.device_settings import DeviceSection
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.local_parameters import Patterns
from edgeasync.training.micro_batches import MicroBatch
from edgeasync.training.numpy_models import Model

BANDWIDTH_BYTES_PER_S_MIN = 1 << 14
"""Under a lower cap a single piece would take longer than the hub waits for a sign of life."""


OF_A_PEER = "a device without a hub is a peer: use edgeasync.Peer, or 'edgeasync peer' and a peer's settings file"


class AgentSection(DeviceSection, frozen=True):
    """`[agent]`: which hub, which data, and who this device is."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(
        PeerSection.__struct_fields__, OF_A_PEER
    ) | dict.fromkeys(("output", "train", "freeze"), f"the hub says it, with the model; {OF_A_PEER}")

    hub: str | Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] | None = None
    trainer: str | None = None
    micro_batch_size: MicroBatch | None = None
    local_steps_max: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    delay_steps: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    graph_bytes_max: ByteCount = ByteCount(GRAPH_BYTES_MAX)
    parameters_max: Annotated[int, Meta(ge=1, le=PARAMETERS_MAX)] | None = None
    bandwidth_bytes_per_s_max: ByteCount | None = None
    link_share: Annotated[float, Meta(ge=0.01, lt=1)] | None = None
    bytes_per_day_max: ByteCount | None = None
    spool: Literal["identity", "full"] = "identity"
    alone_steps_max: Annotated[int, Meta(ge=0, le=2**31)] = 0
    local: Patterns = ()
    enrol: str | None = None
    hub_key: str | None = None
    insecure: bool = False
    when_finished: Literal["exit", "wait"] = "exit"

    @property
    def hubs(self) -> tuple[str, ...]:
        """The addresses of the hubs, in the order they are tried in."""
        return (self.hub,) if isinstance(self.hub, str) else self.hub or ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.hub, str):
            force_setattr(self, "hub", whole_address(self.hub))
        elif self.hub is not None:
            force_setattr(self, "hub", tuple(map(whole_address, self.hub)))
        if self.trainer is not None:
            check_name(self.trainer, "trainer")
        if (
            self.bandwidth_bytes_per_s_max is not None
            and self.bandwidth_bytes_per_s_max < BANDWIDTH_BYTES_PER_S_MIN
        ):
            raise ValueError("bandwidth_bytes_per_s_max must be at least 16 KiB: a piece has 64 KiB")
        if self.local_steps_max is not None and (self.delay_steps or 0) > self.local_steps_max:
            raise ValueError(
                f"delay_steps is {self.delay_steps}, over local_steps_max, {self.local_steps_max}: a device has "
                "one unanswered update at a time, so that each counts exactly once; give at most as many"
            )
        most = self.bytes_per_day_max
        if most is not None and not BYTES_PER_DAY_MIN <= most <= COUNT_MAX:
            raise ValueError("bytes_per_day_max must be at least 128 KiB, and at most 9007199 GB")


class ThrottleSection(Section, frozen=True):
    """`[throttle]`: when a device pauses, and how fast it trains."""

    temperature_c_max: Annotated[float, Meta(ge=30, le=150)] = 80.0
    temperature_c_slow: Annotated[float, Meta(ge=30, le=150)] | None = None
    only_on_mains: bool = False
    only_unmetered: bool = False
    battery_min: Annotated[float, Meta(gt=0, le=1)] | None = None
    memory_free_bytes_min: ByteCount | None = None
    quiet_hours: str | None = None
    cpu_share: Annotated[float, Meta(ge=0.01, le=1)] = 1.0

    @property
    def limits(self) -> ThrottleLimits:
        """What the device's governor keeps to."""
        slow_c = self.temperature_c_slow
        return ThrottleLimits(
            temperature_c_max=self.temperature_c_max,
            temperature_c_slow=self.temperature_c_max - HYSTERESIS_C if slow_c is None else slow_c,
            only_on_mains=self.only_on_mains,
            only_unmetered=self.only_unmetered,
            battery_min=self.battery_min,
            memory_free_bytes_min=self.memory_free_bytes_min,
            quiet=None if self.quiet_hours is None else _read_hours(self.quiet_hours),
            cpu_share=self.cpu_share,
        )

    def __post_init__(self) -> None:
        if self.temperature_c_slow is not None and self.temperature_c_slow > self.temperature_c_max:
            raise ValueError("temperature_c_slow is over temperature_c_max: a device slows down before it pauses")
        if self.quiet_hours is not None:
            _read_hours(self.quiet_hours)


def _read_hours(text: str) -> tuple[int, int]:
    """Return the minutes of the day from which and until; raises `ValueError`."""
    found = re.fullmatch(r"([01][0-9]|2[0-3]):([0-5][0-9])-([01][0-9]|2[0-3]):([0-5][0-9])", text)
    if found is None:
        raise ValueError(f"quiet_hours {text!r} is not like '22:00-07:00'")
    from_hour, from_minute, to_hour, to_minute = map(int, found.groups())
    begin, end = 60 * from_hour + from_minute, 60 * to_hour + to_minute
    if begin == end:
        raise ValueError(f"quiet_hours {text!r} begin and end at the same minute: leave them out, or change one")
    return begin, end


class AgentSettings(Section, frozen=True):
    """An agent's settings file; with `[model]` it insists on that model."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(("peer", "peers", "local"), OF_A_PEER)

    agent: AgentSection = AgentSection()
    throttle: ThrottleSection = ThrottleSection()
    model: Model | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.model.local:
            raise ValueError("model.local is a hub's key; on a device [agent] local keeps arrays to itself")
