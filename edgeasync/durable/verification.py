"""Verify that a run's journal leads to the states in its checkpoints."""

from pathlib import Path
from typing import Literal

import msgspec

from edgeasync.durable.run_folder import RunFolder
from edgeasync.durable.run_replay import RunReplay
from edgeasync.errors import PluginError, StorageError


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The result of verifying a run.

    The journal contains `entries` entries, which lead to the state of each checkpoint in
    `compared`. The checkpoints in `read` are undamaged but were not compared. Either the replay
    begins at them, or the journal no longer contains the entries that lead to them.
    `updates_applied` and `version` are the values at the end of the journal. The last
    `unfinished_bytes` bytes of the journal belong to an unfinished write.
    """

    event: Literal["verified"] = "verified"
    entries: int
    compared: list[str]
    read: list[str]
    version: int
    updates_applied: int
    unfinished_bytes: int


def verify_run(run: Path, *, trust_code: bool = False) -> Verified:
    """Replay a run's whole journal, and compare the state with each checkpoint on the way.

    Raises `StorageError` if a file is damaged, if the journal leads to a state that differs from a
    checkpoint, or if the numbers of updates are inconsistent. Raises `PluginError` if a plugin may
    not be imported without `trust_code`, or if it decides differently than it did in the run.
    """
    entries, unfinished, compared = 0, 0, list[str]()
    last: RunReplay | None = None
    for replay in RunReplay.of_parts(run, trust_code=trust_code, verify=True):
        if replay.plugins:
            raise PluginError(f"{run}: cannot be verified: {' | '.join(replay.remarks)}")
        unfinished += replay.tell(lambda _: True)
        if contradiction := replay.core.imbalance():
            raise StorageError(
                f"{run}: inconsistent counts at entry {replay.last}: {contradiction}; restore the folder from a "
                "backup"
            )
        entries += replay.last - replay.beginning.entry
        compared += reversed(replay.compared)
        last = last or replay
    assert last is not None
    return Verified(
        entries=entries,
        compared=compared,
        read=_read_others(run, compared),
        version=last.core.version,
        updates_applied=last.core.updates_applied,
        unfinished_bytes=unfinished,
    )


def _read_others(run: Path, compared: list[str]) -> list[str]:
    """Read the checkpoints that were not compared; return their names. Raises `StorageError`."""
    store = RunFolder(run).checkpoints
    readable, unreadable = store.manifests()
    if unreadable:
        raise StorageError(f"{run}: {' | '.join(reason for _, reason in unreadable)}")
    others = [(name, manifest.fingerprint) for name, manifest in readable if name not in compared]
    for name, fingerprint in others:
        store.load(name, fingerprint)
    return [name for name, _ in others]
