"""What the settings files of an agent and of a peer have in common."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from edgeasync.config import FilePath, Section, whole_address
from edgeasync.protocol.messages import DEVICE_ID_PATTERN


class DeviceSection(Section, frozen=True):
    """Which data a device trains on, who it is, and how it computes: keys of `[agent]` and of `[peer]`."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        "data": "Training",
        "device_id": "Identity",
        "seed": "Training",
        "hub": "Connection",
    }

    data: FilePath | None = None
    """This device's examples, `.npz` or `.csv`: [Data on a device](/train/data.md). An agent with a `trainer` of
    its own may do without.
    """
    device_id: str | None = None
    """This device's name; by default the enrolled one, or the host's. No two live devices may share one. A letter
    or digit, then up to 63 letters, digits, `.`, `_` or `-`; for several agents on one board then `/0` to `/999`.
    """
    state: FilePath | None = None
    """Folder of this device's identity and keys; by default `~/.local/state/edgeasync/DEVICE_ID`. Each agent and
    peer needs its own.
    """
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """Seed of the order in which examples are drawn."""
    step_s_min: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Least time of a local step. The device sleeps when it computes faster: to spare a shared machine, or to
    imitate a slower one.
    """
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Cores for a step of an ONNX model. By default as the [board's
    profile](/devices/memory.md#profiles-of-boards) says, or 1.
    """
    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = "auto"
    """What computes an ONNX model; `auto` takes a GPU if the installed onnxruntime has one. If a provider is
    missing or does not start, the device warns and takes the CPU.
    """
    progress_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0
    """Longest time without a local step before systemd's watchdog is told that the trainer hangs. [The
    watchdog](/devices/service.md#the-watchdog) says what follows.
    """

    hub: str | Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] | None = None
    """The hub's address, `tcp://HOST:PORT`; several are tried in turn. Without it an enrolled agent uses its
    hub's, and others `tcp://127.0.0.1:5555`. A name is looked up as IPv4 and, if it has no such address, as IPv6.
    An agent that has lost its hub tries the same one again, then the others; it also leaves one that is full. A
    peer finds the others [through a hub](/train/peers.md#found-through-a-hub), instead of by a file.
    """
    enrol: str | None = None
    """Token of `edgeasync keys enrol`, with which this device brings its own key to the hub. The flag takes `-` to
    read it from standard input, so that no other user of the machine sees it. A token that has enrolled this
    device before is skipped, so the line may stay.
    """

    @property
    def hubs(self) -> tuple[str, ...]:
        """The addresses of the hubs, in the order they are tried in."""
        return (self.hub,) if isinstance(self.hub, str) else self.hub or ()

    @property
    def cores_used(self) -> int:
        """How many cores a step may use."""
        return self.threads or 1

    def __post_init__(self) -> None:
        if isinstance(self.hub, str):
            force_setattr(self, "hub", whole_address(self.hub))
        elif self.hub is not None:
            force_setattr(self, "hub", tuple(map(whole_address, self.hub)))
        if self.device_id is not None and not re.match(DEVICE_ID_PATTERN, self.device_id):
            raise ValueError(
                f"device_id {self.device_id!r} is not a name: begin with a letter or digit, "
                "then up to 63 letters, digits, '.', '_' or '-'"
            )
