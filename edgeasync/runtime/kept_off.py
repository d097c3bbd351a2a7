"""What the hub's bounds kept off: for the status, and for a warning now and then."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from edgeasync.net.hub_listener import HubListener

TELL_S = 60.0
"""The least time between two lines about what was kept off."""


class KeptOff:
    """Counts what was kept off by its reason."""

    def __init__(self, network: HubListener) -> None:
        self._network = network
        self._told: Counter[str] = Counter()
        self._tell_at_s = 0.0

    def news(self, denied: Mapping[Any, int], now_s: float) -> str:
        """Return a sentence about what was kept off since the last one; empty if there is nothing to tell yet."""
        counts = Counter[str](denied) + self._network.kept_off
        if counts == self._told or now_s < self._tell_at_s:
            return ""
        more = ", ".join(f"{count} {reason}" for reason, count in sorted((counts - self._told).items()))
        self._told, self._tell_at_s = counts, now_s + TELL_S
        return f"kept off by bounds: {more}; docs/operate/bounds.md says what each is"

    def counts(self, denied: Mapping[Any, int]) -> dict[str, int]:
        """Return how many were not let in, and what was cut short, by the reason."""
        counts: Counter[str] = Counter(denied)
        counts.update(self._network.kept_off)
        counts.update(self._network.not_let_in)
        return dict(sorted(counts.items()))
