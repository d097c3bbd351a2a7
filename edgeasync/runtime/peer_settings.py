"""A peer's settings file as frozen structs. `docs/settings.md` lists every key."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import force_setattr

from edgeasync.config import FilePath, Section, whole_address
from edgeasync.core.arrays.peer_round import check_peer_codec
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.protocol.messages import OtherFrozen
from edgeasync.protocol.peer_messages import Topology
from edgeasync.runtime.device_settings import DeviceSection
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import LocalTraining


class PeerSection(DeviceSection, frozen=True):
    """`[peer]`: which device this is, how it averages its model with others', and when it ends."""

    topology: Topology = "ring"
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bind is not None:
            force_setattr(self, "bind", whole_address(self.bind))
        check_peer_codec(self.codec)
        if self.steps_max is not None and self.epochs is not None:
            raise ValueError("steps_max and epochs say the same: give one of the two")


class PeerSettings(Section, frozen=True):
    """A peer's settings file: how it averages, how it trains, and the model that it trains."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("agent", "throttle"), "that table is of an agent's file; write what a peer has to know into [peer]"
    )

    peer: PeerSection = PeerSection()
    local: LocalTraining = LocalTraining()
    model: Model | OnnxModel | None = None

    def __post_init__(self) -> None:
        if self.model is not None and self.model.local:
            raise ValueError("model.local is a hub's key; peers average all arrays")

    def missing(self) -> str:
        """Return what `edgeasync peer` cannot begin without, as a question; empty if all is there."""
        if self.peer.peers is None:
            return "which peers? give --peers FILE, a TOML file that names them, or [peer] peers"
        if self.peer.data is None:
            return "which data? give --data FILE.npz or FILE.csv, or [peer] data in a settings file"
        return ""
