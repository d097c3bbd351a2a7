"""Which versions belong to a run. Part of `HubCore`.

Every start of a hub creates a branch with its own lineage. It continues the versions up to the
state that it resumes from. Versions after that state are lost, or belong to another hub. So the
versions of a hub restored from a backup are never confused with those of the original hub.
"""

import msgspec

from edgeasync.protocol.messages import ModelVersion

ANCESTORS_MAX = 256
"""How many earlier lineages are stored; devices with an older version get the whole model."""


class Ancestry(msgspec.Struct):
    """The lineages whose versions belong to this run.

    `lineage` is that of new versions. `shared` maps each earlier lineage to its last version in
    this run.
    """

    lineage: str
    shared: dict[str, int] = {}

    def knows(self, version: ModelVersion) -> bool:
        """Return whether a version belongs to this run."""
        return version.lineage == self.lineage or version.number <= self.shared.get(version.lineage, -1)

    def branch(self, lineage: str, number: int) -> None:
        """Start a branch at `number`, the newest version of the resumed state."""
        shared = {earlier: min(last, number) for earlier, last in self.shared.items()} | {self.lineage: number}
        self.shared = dict(list(shared.items())[-ANCESTORS_MAX:])
        self.lineage = lineage
