"""The hub's side of the handshake: whether a device has the frozen arrays of the others. Part of `HubCore`."""

import msgspec

from edgeasync.core.hub.settings import HubCoreSettings
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol.messages import Framework, Frozen, Hello


class FirstFrozen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The checksum of the first device that joined with one."""

    checksum: str
    device_id: str


class FrozenState(msgspec.Struct):
    """The durable fields of `FrozenArrays`."""

    first: dict[Framework, FirstFrozen] = {}


class FrozenArrays:
    """Compares a device's checksum of its frozen arrays with the hub's own or, without one, the first device's.

    It ignores a device whose other arrays are not the hub's: that device raises an error that names them.
    """

    def __init__(self, spec: ParameterSpec, settings: HubCoreSettings) -> None:
        self._layout = spec.layout
        self._own = settings.frozen_arrays
        self.refuses = settings.frozen == "refuse"
        """Whether a device with other arrays must stay out."""
        self.state = FrozenState()

    def difference(self, hello: Hello) -> str:
        """Return a sentence about a device with other arrays, else nothing."""
        frozen = self._compared(hello)
        if frozen is None:
            return ""
        first = self.state.first.get(frozen.framework)
        if self._own is not None and self._own.framework == frozen.framework:
            theirs, whose = self._own.checksum, "the hub's"
        elif first is not None:
            theirs, whose = first.checksum, f"those of {first.device_id}, which joined first"
            if first.device_id == hello.device_id:
                whose = "those that it joined with before"
        else:
            return ""
        if frozen.checksum == theirs:
            return ""
        return f"the frozen arrays of {hello.device_id}, which do not travel, differ from {whose}"

    def note(self, hello: Hello) -> None:
        """Note the checksum of a device that has joined, if it is the first one."""
        frozen = self._compared(hello)
        if frozen is not None:
            self.state.first.setdefault(frozen.framework, FirstFrozen(frozen.checksum, hello.device_id))

    def forget(self, device_id: str) -> None:
        """Drop what a device has said whose key counts no more."""
        for framework, first in list(self.state.first.items()):
            if first.device_id == device_id:
                del self.state.first[framework]

    def _compared(self, hello: Hello) -> Frozen | None:
        return hello.frozen if hello.layout == self._layout else None
