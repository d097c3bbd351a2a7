"""What the settings files of an agent and of a peer have in common."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from edgeasync.config import FilePath, Section
from edgeasync.protocol.messages import DEVICE_ID_PATTERN


class DeviceSection(Section, frozen=True):
    """Which data a device trains on, who it is, and how it computes: keys of `[agent]` and of `[peer]`."""

    GROUPS: ClassVar[Mapping[str, str]] = {"data": "Training", "device_id": "Identity", "seed": "Training"}

    data: FilePath | None = None
    """This device's examples; needed here or as flag `--data`, but not with a `trainer`. `.npz` or `.csv`: [Data
    on a device](/train/data.md).
    """
    device_id: str | None = None
    """This device's name. No two live devices may share one. A letter or digit, then up to 63 letters, digits,
    `.`, `_` or `-`; for several agents on one board then `/0` to `/999`. Without this key: the enrolled name, or
    else the host's name.
    """
    state: FilePath | None = None
    """Folder of this device's identity and keys, one for each agent. Without it:
    `~/.local/state/edgeasync/DEVICE_ID`.
    """
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    """Seed of the order in which the agent draws examples."""
    step_s_min: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Every local step takes at least this time; the agent sleeps when it computes faster. It spares a shared
    machine, or imitates a slower one.
    """
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Cores that a step of an ONNX model may use. Without it: as the [board's
    profile](/devices/memory.md#profiles-of-boards) says, or 1.
    """
    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = "auto"
    """What computes an ONNX model. `auto` takes a GPU if the installed onnxruntime has one. If a provider is
    missing or does not start, the agent warns and takes the CPU.
    """
    progress_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0
    """For how long a trainer may take no local step before `edgeasync agent` tells systemd's watchdog that it
    hangs; [The watchdog](/devices/service.md#the-watchdog).
    """

    @property
    def cores_used(self) -> int:
        """How many cores a step may use."""
        return self.threads or 1

    def __post_init__(self) -> None:
        if self.device_id is not None and not re.match(DEVICE_ID_PATTERN, self.device_id):
            raise ValueError(
                f"device_id {self.device_id!r} is not a name: begin with a letter or digit, "
                "then up to 63 letters, digits, '.', '_' or '-'"
            )
