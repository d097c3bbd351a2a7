"""A peer's settings file as frozen structs. `docs/reference/settings/index.md` lists every key."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta
from msgspec.structs import force_setattr

from edgeasync.config import FilePath, Section, whole_address
from edgeasync.core.arrays.peer_round import check_peer_codec
from edgeasync.graphs.onnx_model import OnnxModel
from edgeasync.net.address import host_of
from edgeasync.protocol.messages import PEER_ADDRESS_PATTERN, OtherFrozen
from edgeasync.protocol.peer_messages import Topology
from edgeasync.runtime.device_settings import DeviceSection
from edgeasync.training.numpy_models import Model
from edgeasync.training.plan import LocalTraining


class PeerSection(DeviceSection, frozen=True):
    """`[peer]`: which device this is, how it averages its model with others', and when it ends."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        **DeviceSection.GROUPS,
        "topology": "Averaging",
        "peers": "Connection",
        "round_every_s": "Averaging",
        "steps_max": "Training",
    }

    INSTEAD: ClassVar[Mapping[str, str]] = {"steps_max": "epochs", "epochs": "steps_max"}

    topology: Topology = "ring"
    """How devices average: in a ring, or each with all. The same on all devices."""
    peers: FilePath | None = None
    """The devices that average, a TOML file, the same on all: [The file of
    peers](/train/peers.md#the-file-of-peers).
    """
    address: str | None = None
    """With `hub`: where the other devices reach this one, `tcp://HOST:PORT`."""
    bind: str | None = None
    """Where to listen, `tcp://HOST:PORT`; by default at this device's address, be it from a file or from here."""
    round_every_s: Annotated[float, Meta(gt=0, le=86400)] = 1.0
    """Time from one round to the next. The device with the lowest name that is there decides. The same on all
    devices.
    """
    round_steps: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Local steps from one round to the next, instead of a time. A device then waits, up to a lease, before it
    takes twice as many without a mean. The same on all devices.
    """
    codec: str = "identity"
    """How models travel: `identity`, `float16`, `bfloat16`, `int8` or `int4`, each also with `+zstd`. The same on
    all devices.
    """
    lease_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    """Longest silence of a peer or a round, before the others continue without it. Pings go five times in a lease.
    """
    steps_max: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """Local steps of all starts, after which the device waits for one more round and ends."""
    epochs: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Passes over this device's data after which it ends, instead of `steps_max`."""
    rounds_max: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    """Rounds after which the device ends."""
    frozen: OtherFrozen = "refuse"
    """What to do with a peer whose frozen arrays differ: do not hear it (`refuse`), or average with it and warn
    once. See [Frozen parameters](/train/join.md#frozen-parameters).
    """
    out: FilePath | None = None
    """Where to write the trained model at the end, `.onnx` or `.safetensors`. `.onnx` needs a forward model. It is
    not one of the files that this device reads.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bind is not None:
            force_setattr(self, "bind", whole_address(self.bind))
        if self.hub is not None and self.peers is not None:
            raise ValueError("peers and hub say the same: give one of the two")
        for name, value in (("address", self.address), ("enrol", self.enrol)):
            if value is not None and self.hub is None:
                raise ValueError(f"{name} goes with hub, which tells the other devices of this one")
        if self.address is not None and not re.match(PEER_ADDRESS_PATTERN, self.address):
            raise ValueError(
                f"address {self.address!r}: write tcp://HOST:PORT, as the other devices reach this one"
            )
        if self.address is not None and host_of(self.address) in ("0.0.0.0", "::"):  # noqa: S104
            raise ValueError(f"address {self.address!r} is every address of this device: write one of them")
        check_peer_codec(self.codec)
        if self.steps_max is not None and self.epochs is not None:
            raise ValueError("steps_max and epochs say the same: give one of the two")


class PeerSettings(Section, frozen=True):
    """A peer's settings file: how it averages, how it trains, and the model that it trains."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("agent", "throttle"), "that table is of an agent's file; write what a peer has to know into [peer]"
    )

    peer: PeerSection = PeerSection()
    """Which device, which data, how it averages, and when it ends."""
    local: LocalTraining = LocalTraining()
    """How the device trains, as in a hub's file."""
    model: Model | OnnxModel | None = None
    """The model to train, as in a hub's file, without the kind `custom`. Needed here or as flag `--model`."""

    def __post_init__(self) -> None:
        if self.model is not None and self.model.local:
            raise ValueError("model.local is a hub's key; peers average all arrays")

    def missing(self) -> str:
        """Return what `edgeasync peer` cannot begin without, as a question; empty if all is there."""
        peer = self.peer
        if peer.peers is None and peer.hub is None:
            return (
                "which peers? give --peers FILE, a TOML file that names them, or --hub ADDRESS, which knows them"
            )
        if peer.hub is not None and peer.address is None:
            return "which address? give --address tcp://HOST:PORT, where the other devices reach this one"
        if peer.data is None:
            return "which data? give --data FILE.npz or FILE.csv, or [peer] data in a settings file"
        return ""
