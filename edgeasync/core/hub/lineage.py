"""Records which versions belong to a run. Part of `HubCore`.

Each time a hub starts, it creates a branch with its own lineage. The branch continues the versions
up to the state from which the hub resumes. Any later versions are lost, or belong to another hub.
So the versions of a hub that was restored from a backup are never confused with those of the
original hub.
"""

import msgspec

from edgeasync.protocol.messages import ModelVersion

ANCESTORS_MAX = 256
"""Number of earlier lineages to remember. Devices with an older version get the whole model."""


class Ancestry(msgspec.Struct):
    """The lineages whose versions belong to this run.

    New versions get the lineage `lineage`. `shared` maps each earlier lineage to its last version
    that belongs to this run.
    """

    lineage: str
    shared: dict[str, int] = {}

    def knows(self, version: ModelVersion) -> bool:
        """Return whether a version belongs to this run."""
        return version.lineage == self.lineage or version.number <= self.shared.get(version.lineage, -1)

    def branch(self, lineage: str, number: int) -> None:
        """Start a branch at `number`, which is the newest version of the resumed state."""
        shared = {earlier: min(last, number) for earlier, last in self.shared.items()} | {self.lineage: number}
        self.shared = dict(list(shared.items())[-ANCESTORS_MAX:])
        self.lineage = lineage
