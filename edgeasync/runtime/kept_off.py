"""Count messages and connections that the hub refused, for the status and warnings."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from edgeasync.core.engine.sender import name_of_key
from edgeasync.core.hub.membership import Membership
from edgeasync.net.hub_listener import HubListener

TELL_S = 60.0
"""Minimum seconds between two warnings."""


class KeptOff:
    """Counts refused messages and connections by reason."""

    def __init__(self, network: HubListener) -> None:
        self._network = network
        self._told: Counter[str] = Counter()
        self._tell_at_s = 0.0
        self._unseen: list[str] = []
        self._unseen_of: tuple[frozenset[str], int] = (frozenset(), -1)

    def news(self, denied: Mapping[Any, int], now_s: float) -> str:
        """Return a warning about refusals since the last one, or "" if no warning is due."""
        counts = Counter[str](denied) + self._network.kept_off
        if counts == self._told or now_s < self._tell_at_s:
            return ""
        more = ", ".join(f"{count} {reason}" for reason, count in sorted((counts - self._told).items()))
        self._told, self._tell_at_s = counts, now_s + TELL_S
        return f"refused by limits: {more}; docs/operate/bounds.md explains each limit"

    def describe(self, denied: Mapping[Any, int], members: Membership) -> dict[str, Any]:
        """Return fields of the status: refusals by reason, and enrolled devices that never joined."""
        counts: Counter[str] = Counter(denied)
        counts.update(self._network.kept_off)
        counts.update(self._network.not_let_in)
        state = names, _ = self._network.device_names, members.generation
        if state != self._unseen_of:
            self._unseen_of = state
            self._unseen = sorted(names - {name_of_key(device_id) for device_id in members.members})
        return {"denied": dict(sorted(counts.items())), "enrolled_unseen": self._unseen}
