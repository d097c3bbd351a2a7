"""Settings that agents and peers share."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from edgeasync.config import FilePath, Section, whole_address
from edgeasync.protocol.messages import DEVICE_ID_PATTERN


class DeviceSection(Section, frozen=True):
    """Keys that `[agent]` and `[peer]` have in common: the device's data, identity and computation."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        "data": "Training",
        "device_id": "Identity",
        "seed": "Training",
        "hub": "Connection",
    }

    data: FilePath | None = None
    """File of this device's examples, `.npz` or `.csv`: [Data on a device](/train/data.md). It is
    optional for an agent with its own `trainer`.
    """
    device_id: str | None = None
    """This device's name; by default the enrolled name, or the host name. Two live devices must not
    have the same name. It starts with a letter or digit, followed by up to 63 letters, digits, `.`,
    `_` or `-`. For several agents on one board, append `/0` to `/999`.
    """
    state: FilePath | None = None
    """Folder of this device's identity and keys; by default `~/.local/state/edgeasync/DEVICE_ID`.
    Each agent and each peer needs its own folder.
    """
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """Random seed for the order of the examples."""
    step_s_min: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Minimum duration of a local step in seconds. If a step is faster, the device sleeps for the
    remaining time. Use it to reduce the load on a shared machine, or to simulate a slower machine.
    """
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Number of processor cores that a step of an ONNX model may use. The default is the value of
    the [board's profile](/devices/memory.md#profiles-of-boards), or 1.
    """
    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = "auto"
    """Execution provider for an ONNX model; `auto` uses a GPU if the installed onnxruntime supports
    one. If a provider is missing or does not start, the device warns and uses the CPU.
    """
    progress_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0
    """Maximum seconds without a local step before systemd's watchdog treats the trainer as hung.
    [The watchdog](/devices/service.md#the-watchdog) describes what follows.
    """

    hub: str | Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] | None = None
    """The hub's address, `tcp://HOST:PORT`; several addresses are tried in turn. The default is the
    address of the hub that enrolled the agent or, without enrolment, `tcp://127.0.0.1:5555`. A host
    name resolves to its IPv4 address, or to its IPv6 address if it has no IPv4 address. An agent
    that loses its hub tries the same address again, then the other addresses. If a hub is full, the
    agent tries the next address. A peer finds the other peers [through this
    hub](/train/peers.md#found-through-a-hub) instead of in a file.
    """
    enrol: str | None = None
    """Token of `edgeasync keys enrol`, which registers this device's own key at the hub. With `-`,
    the flag reads the token from standard input, so that other users of the machine cannot see it.
    The setting may remain in the file, because a token that has already enrolled this device is
    ignored.
    """

    @property
    def hubs(self) -> tuple[str, ...]:
        """The addresses of the hubs, in the order in which they are tried."""
        return (self.hub,) if isinstance(self.hub, str) else self.hub or ()

    @property
    def cores_used(self) -> int:
        """The number of processor cores that a step may use."""
        return self.threads or 1

    def __post_init__(self) -> None:
        if isinstance(self.hub, str):
            force_setattr(self, "hub", whole_address(self.hub))
        elif self.hub is not None:
            force_setattr(self, "hub", tuple(map(whole_address, self.hub)))
        if self.device_id is not None and not re.match(DEVICE_ID_PATTERN, self.device_id):
            raise ValueError(
                f"device_id {self.device_id!r} is invalid; start with a letter or digit, followed by up to 63 "
                "letters, digits, '.', '_' or '-'"
            )
