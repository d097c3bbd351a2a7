"""Which versions belong to a run. Part of `HubCore`.

Every start of a hub is a branch with its own lineage. It continues the versions up to the state that it resumes.
Versions that an earlier start made after that state are lost, or belong to another hub. So the versions of a hub
that was restored from a backup are never confused with those of the hub it was copied from.
"""

import msgspec

from edgeasync.protocol.messages import ModelVersion

ANCESTORS_MAX = 256
"""How many earlier lineages are remembered; a device with an older version receives the whole model."""


class Ancestry(msgspec.Struct):
    """The `lineage` of new versions; `shared` has each earlier lineage's last version that belongs to this run."""

    lineage: str
    shared: dict[str, int] = {}

    def knows(self, version: ModelVersion) -> bool:
        """Return whether a version belongs to this run."""
        return version.lineage == self.lineage or version.number <= self.shared.get(version.lineage, -1)

    def branch(self, lineage: str, number: int) -> None:
        """Begin a branch at version `number`, the newest one of the state that the run resumes."""
        shared = {earlier: min(last, number) for earlier, last in self.shared.items()} | {self.lineage: number}
        self.shared = dict(list(shared.items())[-ANCESTORS_MAX:])
        self.lineage = lineage
