"""Whose versions a run may call its own. Part of `HubCore`.

Every start of a hub is a branch with a lineage of its own: what an earlier start made after the state that this
one began from was lost, or belongs to another hub by now. So a restored backup is never taken for what it was.
"""

import msgspec

from edgeasync.protocol.messages import ModelVersion

ANCESTORS_MAX = 256
"""Earlier lineages that are remembered; a device that has been away for longer is given the whole model."""


class Ancestry(msgspec.Struct):
    """The `lineage` of new versions, and of each earlier one the last version that this run began from."""

    lineage: str
    shared: dict[str, int] = {}

    def knows(self, version: ModelVersion) -> bool:
        """Return whether a version is of this run."""
        return version.lineage == self.lineage or version.number <= self.shared.get(version.lineage, -1)

    def branch(self, lineage: str, number: int) -> None:
        """Begin a branch at a version, the newest of the state that the run goes on from."""
        shared = {earlier: min(last, number) for earlier, last in self.shared.items()} | {self.lineage: number}
        self.shared = dict(list(shared.items())[-ANCESTORS_MAX:])
        self.lineage = lineage
