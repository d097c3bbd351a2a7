"""An agent's settings file as frozen structs. `docs/settings.md` lists every key.

Apart from a hub's, so that a device loads nothing of a hub.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from msgspec import Meta
from msgspec.structs import force_setattr

from edgeasync.config import Section, convert, whole_address
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import ThrottleSection
from edgeasync.plugins import check_name
from edgeasync.runtime.device_settings import DeviceSection
from edgeasync.runtime.peer_settings import PeerSection
from edgeasync.training.local_parameters import Patterns
from edgeasync.training.micro_batches import MicroBatch
from edgeasync.training.numpy_models import Model

OF_A_PEER = "a device without a hub is a peer: use edgeasync.Peer, or 'edgeasync peer' and a peer's settings file"


class AgentSection(DeviceSection, frozen=True):
    """`[agent]`: which hub, which data, and who this device is."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(PeerSection.__struct_fields__, OF_A_PEER),
        **dict.fromkeys(("output", "train", "freeze"), f"the hub says it, with the model; {OF_A_PEER}"),
        **dict.fromkeys(DeviceLimits.__struct_fields__, "it is a key of [limits]"),
    }

    hub: str | Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] | None = None
    trainer: str | None = None
    micro_batch_size: MicroBatch | None = None
    spool: Literal["identity", "full"] = "identity"
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


class AgentSettings(Section, frozen=True):
    """An agent's settings file; with `[model]` it insists on that model."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(("peer", "peers", "local"), OF_A_PEER)

    agent: AgentSection = AgentSection()
    limits: DeviceLimits = DeviceLimits()
    throttle: ThrottleSection = ThrottleSection()
    model: Model | None = None

    @classmethod
    def of_keys(cls, given: Mapping[str, object], *, where: str) -> Self:
        """Return settings by keys of `[agent]` and `[limits]` in one mapping; raises `ConfigError`."""
        limits = {key: value for key, value in given.items() if key in DeviceLimits.__struct_fields__}
        agent = {key: value for key, value in given.items() if key not in limits}
        return cls(
            agent=convert(agent, AgentSection, where=where), limits=convert(limits, DeviceLimits, where=where)
        )

    def __post_init__(self) -> None:
        if self.model is not None and self.model.local:
            raise ValueError("model.local is a hub's key; on a device [agent] local keeps arrays to itself")
