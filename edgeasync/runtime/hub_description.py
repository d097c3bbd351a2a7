"""The part of the status that only the hub's shell knows: process, files, journal and refusals."""

import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from edgeasync.core.engine.sender import name_of_key
from edgeasync.core.hub.membership import Membership
from edgeasync.durable.commit import GroupCommit
from edgeasync.durable.run import Durability
from edgeasync.net.hub_listener import HubListener
from edgeasync.protocol.status import JournalStatus
from edgeasync.runtime.hub_files import HubFiles

TELL_S = 60.0
"""Minimum seconds between two warnings."""


class HubDescription:
    """Describes the shell since it was created, and counts refused messages and connections."""

    def __init__(self, network: HubListener, files: HubFiles, durability: Durability, parameters: int) -> None:
        self._network = network
        self._files = files
        self._durability = durability
        self._parameters = parameters
        self._started_s = time.monotonic()
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

    def describe(self, log: GroupCommit | None, denied: Mapping[Any, int], members: Membership) -> dict[str, Any]:
        """Return the fields of the status that the shell adds."""
        counts: Counter[str] = Counter(denied)
        counts.update(self._network.kept_off)
        counts.update(self._network.not_let_in)
        return {
            "address": self._network.address,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "model_file": str(self._files.model.resolve()),
            "parameters": self._parameters,
            "durability": self._durability,
            "version_durable": self._files.version_saved if log is None else None,
            "disk_trouble": (log and log.failing) or self._files.unwritten,
            "denied": dict(sorted(counts.items())),
            "enrolled_unseen": self._enrolled_unseen(members),
            "journal": log and JournalStatus(log.durable, log.bytes_appended, log.batches),
        }

    def _enrolled_unseen(self, members: Membership) -> list[str]:
        """Return the enrolled devices that have not joined this run."""
        state = names, _ = self._network.device_names, members.generation
        if state != self._unseen_of:
            self._unseen_of = state
            self._unseen = sorted(names - {name_of_key(device_id) for device_id in members.members})
        return self._unseen
