"""Define a peer's settings file as frozen structs.

`docs/reference/settings/index.md` lists every key.
"""

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
    """`[peer]`: the device, how it averages its model with other peers, and when it ends."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        **DeviceSection.GROUPS,
        "topology": "Averaging",
        "peers": "Connection",
        "round_every_s": "Averaging",
        "steps_max": "Training",
    }

    INSTEAD: ClassVar[Mapping[str, str]] = {"steps_max": "epochs", "epochs": "steps_max"}

    topology: Topology = "ring"
    """How devices exchange models: in a ring, or each device with all other devices. The value must
    be equal on all devices.
    """
    peers: FilePath | None = None
    """TOML file that lists all peers. It must be equal on all devices: [The file of
    peers](/train/peers.md#the-file-of-peers).
    """
    address: str | None = None
    """Address at which the other peers reach this device, `tcp://HOST:PORT`; required with `hub`."""
    bind: str | None = None
    """Address to listen on, `tcp://HOST:PORT`. The default is this device's `address` in its
    settings or in the file of peers.
    """
    round_every_s: Annotated[float, Meta(gt=0, le=86400)] = 1.0
    """Seconds from one round to the next. The live device whose name comes first in alphabetical
    order starts the rounds. The value must be equal on all devices.
    """
    round_steps: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Number of local steps from one round to the next, instead of `round_every_s`. After twice
    that number of steps without a new mean, a device pauses training for up to a lease. The value
    must be equal on all devices.
    """
    codec: str = "identity"
    """Codec for models: `identity`, `float16`, `bfloat16`, `int8` or `int4`, each optionally
    followed by `+zstd`. The value must be equal on all devices.
    """
    lease_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    """Seconds after which the others continue without a peer that sends no messages. They also give
    up a round that makes no progress for that long. Each peer sends five pings per lease.
    """
    steps_max: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """Number of local steps, counted over all starts, after which the device waits for one more
    round and ends.
    """
    epochs: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """Number of passes over this device's data after which it ends, instead of `steps_max`."""
    rounds_max: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    """Number of rounds after which the device ends."""
    frozen: OtherFrozen = "refuse"
    """How to treat a peer whose frozen arrays differ: ignore it (`refuse`), or warn once and
    average with it (`warn`). See [Frozen parameters](/train/join.md#frozen-parameters).
    """
    out: FilePath | None = None
    """File that the trained model is written to at the end, `.onnx` or `.safetensors`. `.onnx`
    requires a forward model. The file must not be an input file of this device.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bind is not None:
            force_setattr(self, "bind", whole_address(self.bind))
        if self.hub is not None and self.peers is not None:
            raise ValueError("peers and hub both define the list of peers; set only one of them")
        for name, value in (("address", self.address), ("enrol", self.enrol)):
            if value is not None and self.hub is None:
                raise ValueError(
                    f"{name} requires the setting hub; the other devices find this one through the hub"
                )
        if self.address is not None and not re.match(PEER_ADDRESS_PATTERN, self.address):
            raise ValueError(
                f"address {self.address!r} is invalid; set tcp://HOST:PORT, at which other devices reach this one"
            )
        if self.address is not None and host_of(self.address) in ("0.0.0.0", "::"):  # noqa: S104
            raise ValueError(
                f"address {self.address!r} stands for all addresses of this device; set the one at which other "
                "devices reach it"
            )
        check_peer_codec(self.codec)
        if self.steps_max is not None and self.epochs is not None:
            raise ValueError("steps_max and epochs both limit the training; set only one of them")


class PeerSettings(Section, frozen=True):
    """A peer's settings file: how the peer averages, how it trains, and its model."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("agent", "throttle"), "that table belongs to an agent's settings file; set a peer's keys in [peer]"
    )

    peer: PeerSection = PeerSection()
    """The device, its data, how it averages its model, and when it ends."""
    local: LocalTraining = LocalTraining()
    """How the device trains, as in a hub's file."""
    model: Model | OnnxModel | None = None
    """The model to train, with the same keys as in a hub's file, but not of kind `custom`. Set it
    here or with the flag `--model`.
    """

    def __post_init__(self) -> None:
        if self.model is not None and self.model.local:
            raise ValueError("model.local is only for hubs, because peers average all arrays; remove it")

    def missing(self) -> str:
        """Return a message about a missing setting that `edgeasync peer` requires, or an empty string."""
        peer = self.peer
        if peer.peers is None and peer.hub is None:
            return (
                "no peers are set; pass --peers FILE, a TOML file that lists them, or --hub ADDRESS, a hub that "
                "knows them"
            )
        if peer.hub is not None and peer.address is None:
            return "no address is set; pass --address tcp://HOST:PORT, at which the other devices reach this one"
        if peer.data is None:
            return "no data is set; pass --data FILE.npz or FILE.csv, or set data in [peer] of a settings file"
        return ""
