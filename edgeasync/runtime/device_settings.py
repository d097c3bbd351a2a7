"""What the settings files of an agent and of a peer have in common."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from edgeasync.config import FilePath, Section
from edgeasync.protocol.messages import DEVICE_ID_PATTERN


class DeviceSection(Section, frozen=True):
    """Which data a device trains on, who it is, and how it computes: keys of `[agent]` and of `[peer]`."""

    data: FilePath | None = None
    device_id: str | None = None
    state: FilePath | None = None
    seed: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    step_s_min: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = "auto"
    progress_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0

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
