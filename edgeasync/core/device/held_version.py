"""The version of the hub's model that a device holds. Part of `WorkCycle`."""

from edgeasync.core.device.pending_push import ModelKey
from edgeasync.protocol.messages import ModelVersion, Welcome


class HeldVersion:
    """The version that the device holds, with the checksum of its model; both are `None` without one."""

    def __init__(self) -> None:
        self.version: ModelVersion | None = None
        self.checksum: int | None = None
        self._recalled: tuple[ModelKey, ModelVersion, int] | None = None
        """The model that an earlier start held, until the hub has said what it trains."""

    def recall(self, model: ModelKey, version: ModelVersion, checksum: int) -> None:
        """Resume with a version that an earlier start held, if the hub trains that model."""
        self._recalled = model, version, checksum

    def welcomed(self, welcome: Welcome) -> None:
        """Hold the version of an earlier start again if it is of the hub's model, else forget it."""
        if self._recalled is not None and self._recalled[0] == ModelKey.of(welcome):
            _, self.version, self.checksum = self._recalled
        self._recalled = None

    def install(self, version: ModelVersion, checksum: int | None) -> None:
        """Hold this version instead."""
        self.version, self.checksum = version, checksum

    def lose(self) -> None:
        """Hold none."""
        self.version = self.checksum = None
