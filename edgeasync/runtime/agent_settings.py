"""An agent's settings file as frozen structs. `docs/settings.md` lists every key.

Apart from a hub's, so that a device loads nothing of a hub.
"""

import re
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from edgeasync.config import FilePath, Section, whole_address
from edgeasync.core.arrays.peer_round import check_peer_codec
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import ThrottleSection
from edgeasync.core.peer.settings import PeerSettings
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.plugins import check_name
from edgeasync.protocol.messages import DEVICE_ID_PATTERN, OtherFrozen
from edgeasync.training.local_parameters import Patterns
from edgeasync.training.micro_batches import MicroBatch
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import LocalTraining


class AgentSection(DeviceLimits, frozen=True):
    """`[agent]`: which hub, which data, and who this device is."""

    hub: str | Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] | None = None
    data: FilePath | None = None
    trainer: str | None = None
    device_id: str | None = None
    state: FilePath | None = None
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    step_s_min: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    micro_batch_size: MicroBatch | None = None
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = "auto"
    spool: Literal["identity", "full"] = "identity"
    local: Patterns = ()
    enrol: str | None = None
    hub_key: str | None = None
    insecure: bool = False
    when_finished: Literal["exit", "wait"] = "exit"
    progress_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0

    @property
    def cores_used(self) -> int:
        """How many cores a step may use."""
        return self.threads or 1

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
        if self.device_id is not None and not re.match(DEVICE_ID_PATTERN, self.device_id):
            raise ValueError(
                f"device_id {self.device_id!r} is not a name: begin with a letter or digit, "
                "then up to 63 letters, digits, '.', '_' or '-'"
            )


class PeersSection(Section, frozen=True):
    """`[peers]`: how this device averages its model with others' without a hub, and when it ends."""

    topology: Literal["star", "ring", "all_to_all"] = "star"
    peers: FilePath | None = None
    bind: str | None = None
    round_every_s: Annotated[float, Meta(gt=0, le=86400)] = 1.0
    round_steps: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    codec: str = "identity"
    lease_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    steps_max: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    epochs: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    rounds_max: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    frozen: OtherFrozen = "refuse"
    out: FilePath | None = None

    def core_settings(self) -> PeerSettings:
        """Return what the core of a peer is told; there is no hub."""
        assert self.topology != "star"
        return PeerSettings(
            topology=self.topology,
            lease_s=self.lease_s,
            round_every_s=self.round_every_s,
            round_steps=self.round_steps,
            codec=self.codec,
            frozen=self.frozen,
        )

    def __post_init__(self) -> None:
        if self.bind is not None:
            force_setattr(self, "bind", whole_address(self.bind))
        check_peer_codec(self.codec)
        if self.steps_max is not None and self.epochs is not None:
            raise ValueError("steps_max and epochs say the same: give one of the two")


class AgentSettings(Section, frozen=True):
    """An agent's settings file; with `[model]` it insists on that model, and trains it if there is no hub."""

    agent: AgentSection = AgentSection()
    throttle: ThrottleSection = ThrottleSection()
    peers: PeersSection = PeersSection()
    local: LocalTraining = LocalTraining()
    model: Model | OnnxModel | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.model.local:
            raise ValueError("model.local is a hub's key; on a device [agent] local keeps arrays to itself")
