"""Compares the frozen arrays of devices during the handshake. Part of `HubCore`."""

import msgspec

from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol.messages import Framework, Frozen, Hello


class FirstFrozen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first checksum that a device reported, and that device's id."""

    checksum: str
    device_id: str


class FrozenState(msgspec.Struct):
    """The durable fields of `FrozenArrays`, by framework."""

    first: dict[Framework, FirstFrozen] = {}


class FrozenArrays:
    """Compares the frozen arrays of devices with those of the hub or of the first device.

    A device with a different parameter layout is not compared. Another check refuses it, and names
    the arrays.
    """

    def __init__(self, spec: ParameterSpec, settings: HubCoreSettings) -> None:
        self._layout = spec.layout
        self._own = settings.frozen_arrays
        self.refuses = settings.frozen == "refuse"
        """Whether a device with different frozen arrays is not allowed to join."""
        self.state = FrozenState()

    def difference(self, hello: Hello) -> str:
        """Return a description of how a device's frozen arrays differ, or "" if they match."""
        frozen = self._compared(hello)
        if frozen is None:
            return ""
        first = self.state.first.get(frozen.framework)
        if self._own is not None and self._own.framework == frozen.framework:
            theirs, whose = self._own.checksum, "the hub's"
        elif first is not None:
            theirs, whose = first.checksum, f"those of {first.device_id}, the first device"
            if first.device_id == hello.device_id:
                whose = "those it joined with before"
        else:
            return ""
        if frozen.checksum == theirs:
            return ""
        return f"the frozen arrays of {hello.device_id}, which are not transmitted, differ from {whose}"

    def note(self, hello: Hello) -> None:
        """Record the checksum of a joined device if no earlier device has reported one."""
        frozen = self._compared(hello)
        if frozen is not None:
            self.state.first.setdefault(frozen.framework, FirstFrozen(frozen.checksum, hello.device_id))

    def forget(self, device_id: str) -> None:
        """Drop the checksum of a device whose key is no longer valid."""
        for framework, first in list(self.state.first.items()):
            if first.device_id == device_id:
                del self.state.first[framework]

    def _compared(self, hello: Hello) -> Frozen | None:
        return hello.frozen if hello.layout == self._layout else None
