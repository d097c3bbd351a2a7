"""`GraphFetch`: which part of the hub's model a device looks for or fetches. Part of `WorkCycle`."""

from typing import Literal

from edgeasync.core.device import effects, events
from edgeasync.core.device.data_quota import DataQuota, needed_bytes
from edgeasync.core.device.effects import DeviceEffect
from edgeasync.core.device.handshake import refuse_graph
from edgeasync.protocol.graph import Base
from edgeasync.protocol.messages import FetchGraph, GraphHeader, Welcome

LOCKED_S = 2.0
"""Time until the device checks again whether another process has downloaded the base."""


class GraphFetch:
    """The graph and its base: what the device has, lacks, and does to get it.

    The device first needs the graph, then the base. It looks for each in its cache, and fetches
    what is missing. A fetched part of a base is stored, so that the device fetches only the rest
    after a cut or a restart.
    """

    def __init__(self, data_quota: DataQuota) -> None:
        self.is_busy = False
        """Whether the shell looks for a part or verifies it. The device then requests nothing."""
        self._quota = data_quota
        self._welcome: Welcome | None = None
        self._has_graph = self._has_base = False
        self._stored_bytes = 0
        self._must_look = self._is_locked = False
        """Whether the device looks for the base again before it requests the base."""
        self.failures = 0
        """How often the current part could not be received or stored, without any progress."""
        self._reported = set[str]()
        """The reasons for these failures."""

    def welcomed(self, welcome: Welcome) -> None:
        """Process a `Welcome`. A device leaves a hub whose graph differs from an earlier one."""
        self._welcome = welcome

    @property
    def is_complete(self) -> bool:
        """Whether the device has all that the hub's `Welcome` names."""
        welcome = self._welcome
        return welcome is None or (
            (welcome.graph is None or self._has_graph) and (welcome.base is None or self._has_base)
        )

    @property
    def _hub(self) -> Welcome:
        assert self._welcome is not None
        return self._welcome

    @property
    def _needs_base(self) -> bool:
        """Whether the base is the part that is looked for or fetched."""
        return self._has_graph

    @property
    def missing_bytes(self) -> int:
        """The number of bytes to fetch of the current part."""
        return self._hub.base_bytes - self._stored_bytes if self._needs_base else self._hub.graph_bytes

    def look(self) -> list[DeviceEffect]:
        """Look for the current part, unless the shell is busy with it."""
        if self.is_busy:
            return []
        self.is_busy, self._must_look = True, False
        if not self._needs_base:
            assert self._hub.graph is not None
            return [effects.FindGraph(self._hub.graph)]
        assert self._hub.base is not None
        return [effects.FindBase(Base(self._hub.base, self._hub.base_bytes))]

    def request(self) -> list[DeviceEffect]:
        """Request the current part from the hub, or look for it first."""
        if self._must_look:
            return self.look()
        return [effects.SendToHub(FetchGraph(self._hub.session, self._needs_base))]

    def offered(self, graph: GraphHeader) -> list[DeviceEffect]:
        """Receive a part if it is the current one; refuse another one."""
        hub = self._hub
        announced = (hub.base, hub.base_bytes) if self._needs_base else (hub.graph, hub.graph_bytes)
        if (graph.fingerprint, graph.payload_bytes) != announced:
            return [refuse_graph("the hub sent another graph than it announced; do not trust this hub")]
        return [effects.TakeGraph(graph, self._needs_base)]

    def held(self, event: events.GraphHeld) -> list[DeviceEffect]:
        """Note that the device has the current part; report this."""
        self.is_busy, self.failures = False, 0
        self._reported.clear()
        what, nbytes = self._part
        self._has_base, self._has_graph = self._has_graph, True
        way = "fetched" if event.fetched else "from the cache"
        return [effects.DeviceReport(what, f"{way}, {nbytes} bytes")]

    def missing(self, event: events.GraphMissing) -> list[DeviceEffect]:
        """Note how much of the current part is stored; request the rest, or refuse it."""
        if event.stored_bytes > self._stored_bytes:
            self.failures = 0
        self.is_busy, self._stored_bytes = False, event.stored_bytes
        if not self._needs_base:
            return []
        quota, needed = self._quota.bytes_per_day_max, needed_bytes(self.missing_bytes)
        if quota is not None and needed > quota:
            return [
                refuse_graph(
                    f"the hub's base needs {needed} more bytes, but this device's quota is {quota} bytes a day; "
                    "start the agent once without [limits] bytes_per_day_max, or copy the base into [agent] "
                    "base_cache"
                )
            ]
        detail = f"downloading from byte {event.stored_bytes} of {self._hub.base_bytes}"
        return [effects.DeviceReport("base", detail)]

    def locked(self) -> list[DeviceEffect]:
        """Look for the base again later; report once that another agent downloads it."""
        is_news = not self._is_locked
        self._look_again()
        self._is_locked = True
        return [effects.DeviceReport("base", "another agent on this machine downloads it")] if is_news else []

    def broken(self, event: events.GraphBroken) -> list[DeviceEffect]:
        """Note that the current part could not be received or stored; report each reason once."""
        self._look_again()
        self.failures += 1
        is_news = event.reason not in self._reported
        self._reported.add(event.reason)
        return [effects.DeviceReport("warning", event.reason)] if is_news else []

    def _look_again(self) -> None:
        """Look for a base again before the next request, because its file may have changed."""
        self.is_busy, self._must_look = False, self._needs_base

    @property
    def _part(self) -> tuple[Literal["graph", "base"], int]:
        """The name and size of the current part."""
        return ("base", self._hub.base_bytes) if self._needs_base else ("graph", self._hub.graph_bytes)
