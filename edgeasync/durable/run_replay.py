"""Replay a run from its folder alone: apply and describe each journal entry, without writing.

This works on a copy, and on a folder to which a hub is writing. The journal does not always
continue from a checkpoint. If a hub returned to an earlier checkpoint, or resumed under other
rules, there is a gap in the entry numbers. Only the checkpoint that the hub wrote at that time
closes the gap.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.effects import HubEffect
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.policy_engine import describe_evaluation
from edgeasync.core.recovery.decisions import check_state
from edgeasync.core.recovery.log import Entry
from edgeasync.core.recovery.state import capture, find_difference
from edgeasync.durable.checkpoint import ChosenCheckpoint, Manifest
from edgeasync.durable.journal import JournalReading
from edgeasync.durable.recovery import NO_CODE, Recovered, Rules, look_at_checkpoint, open_checkpoint, read_rules
from edgeasync.durable.run_events import Line, RunDescriber
from edgeasync.durable.run_folder import JournalPart, RunFolder
from edgeasync.errors import ConfigError, ModelMismatchError, StorageError
from edgeasync.parameters import ParameterSpec
from edgeasync.plugins import Trust
from edgeasync.policies.guards import plugins_of
from edgeasync.protocol.status import EvaluationStatus
from edgeasync.protocol.wire import checksum


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """Where the replay begins: after journal entry `entry`, with the state of `checkpoint`.

    `remarks` contains warnings.
    """

    event: Literal["begins"] = "begins"
    checkpoint: str
    entry: int
    hub_s: float
    lineage: str
    version: int
    updates_applied: int
    remarks: list[str]


class ReplayedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device after the last replayed entry. `seq_last` is the number of its last update."""

    id: str
    state: str
    seq_last: int
    updates_applied: int


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The state after the last replayed entry.

    `model_xxh3` is a checksum of the model. The last `unfinished_bytes` bytes of the journal belong
    to an unfinished write. `model` is the file that was written, if any.
    """

    event: Literal["summary"] = "summary"
    entry: int
    hub_s: float
    lineage: str
    version: int
    model_xxh3: str
    updates_applied: int
    updates_rejected: int
    updates_buffered: int
    duplicates: int
    rollbacks: int
    evaluation: EvaluationStatus | None
    best: EvaluationStatus | None
    devices: list[ReplayedDevice]
    unfinished_bytes: int
    model: str | UnsetType = UNSET


class RunReplay:
    """A replay of a run. Close it after use."""

    def __init__(
        self,
        run: Path,
        *,
        until: int | None = None,
        checkpoint: str | None = None,
        trust_code: bool = False,
        verify: bool = False,
    ) -> None:
        """Begin the replay at `checkpoint` or, by default, at the earliest possible one.

        The replay ends after entry `until`.

        If `checkpoint` is "latest", the replay begins at the checkpoint from which a restarted hub
        would resume. Without `trust_code`, no plugin is imported, so a run with plugins is replayed
        only up to its last checkpoint. With `verify`, the whole state is compared with every
        checkpoint that the replay passes.

        Raises `StorageError` if the folder is not a run or has no usable checkpoint. Raises
        `ConfigError` if entry `until` is not available.
        """
        self._until = until
        self._verify = verify
        self._trust = Trust(installed=True, code=True) if trust_code else NO_CODE
        self._folder = RunFolder.open(run)
        self._files = self._folder.snapshot()
        self._checkpoints = {one[1].journal: one for one in reversed(self._files.manifests)}
        self.created_s = 0.0
        """Wall-clock time at which the first checkpoint was written."""
        self.remarks: list[str] = []
        self.compared: list[str] = []
        """The names of the checkpoints with which the state was compared."""
        self.earlier: int | None = None
        """The last entry of the previous part of the journal, to be passed as `until`.

        It is `None` for the first part.
        """
        try:
            self._state = self._begin_early() if checkpoint is None else self._begin_at(checkpoint)
        except BaseException:
            self.close()
            raise
        core = self._state.core
        self.beginning = Beginning(
            checkpoint=self._state.checkpoint,
            entry=self._state.last,
            hub_s=self._state.now_s,
            lineage=core.lineage,
            version=core.version,
            updates_applied=core.updates_applied,
            remarks=self.remarks,
        )

    @classmethod
    def of_parts(cls, run: Path, *, trust_code: bool = False, verify: bool = False) -> Iterator[Self]:
        """Yield a replay of each part of the journal, last part first.

        Each replay is closed when the next one is requested.
        """
        until: int | None = None
        while True:
            with closing(cls(run, until=until, trust_code=trust_code, verify=verify)) as replay:
                yield replay
            until = replay.earlier
            if until is None:
                return

    def close(self) -> None:
        """Close the journal."""
        self._files.close()

    @property
    def spec(self) -> ParameterSpec:
        """The layout of the model."""
        return self._state.rules.spec

    @property
    def core(self) -> HubCore:
        """The hub's core at the current entry."""
        return self._state.core

    @property
    def last(self) -> int:
        """The number of the current entry."""
        return self._state.last

    @property
    def plugins(self) -> Sequence[str]:
        """The names of plugins that were not imported. Their decisions are not replayed."""
        return self._state.plugins

    @property
    def snapshot(self) -> Snapshot:
        """The model at the current entry."""
        return self._state.model.current

    def tell(self, on_line: Callable[[Line], bool]) -> int:
        """Replay until entry `until` or until `on_line` returns false.

        Return the number of bytes that belong to a torn write. Raises `StorageError` if the journal
        is damaged or, with `verify`, if it leads to a state that differs from a checkpoint. Raises
        `PluginError` if a plugin decides differently than it did in the run. All lines before the
        error have been passed to `on_line`.
        """
        state, until = self._state, self._until
        if state.plugins or (until is not None and until <= state.last):
            return 0
        describer = RunDescriber(state.core)

        def on_entry(number: int, entry: Entry, effects: Sequence[HubEffect]) -> bool:
            told = [on_line(line) for line in describer.lines(number, entry, effects)]
            self._compare(number)
            return all(told) and number != until

        reading = JournalReading(self._files.journal, state.last)
        state.replay(reading, on_entry)
        return sum(tail.nbytes for tail in reading.torn)

    def _compare(self, number: int) -> None:
        """Compare the state with the checkpoint of this entry, if there is one.

        Without `verify`, only runs with plugins are compared. Raises `PluginError` and, with
        `verify`, also `StorageError`.
        """
        state, (name, manifest) = self._state, self._checkpoints.get(number, ("", None))
        if manifest is None or not (self._verify or plugins_of(state.rules.policy)):
            return
        if read_rules(manifest, name, self._trust) != state.rules:
            return
        try:
            tensors = self._folder.checkpoints.load(name, manifest.fingerprint)[1]
        except (StorageError, ModelMismatchError):
            if self._verify and name in dict(self._folder.checkpoints.manifests()[0]):
                raise
            return  # a running hub has removed it
        chosen = ChosenCheckpoint(name, manifest, tensors, [])
        saved = open_checkpoint(chosen, Rules.make_core, lambda: bytes(16), self._trust)
        check_state(state.core, state.model, saved.core, saved.model, number)
        if self._verify:
            now, then = [capture(one.core, one.model, one.publisher, number, 0.0) for one in (state, saved)]
            if difference := find_difference(now, then, self.spec):
                raise StorageError(
                    f"{name}: the journal leads to another state at entry {number}: {difference}; restore the "
                    "folder from a backup, or resume from another checkpoint"
                )
            self.compared.append(name)

    def devices(self) -> list[dict[str, Any]]:
        """Return the devices at the current entry, as in a hub's status."""
        found: list[dict[str, Any]] = self._state.core.status(self._state.now_s)["devices"]
        return found

    def summary(self, unfinished_bytes: int = 0) -> ReplaySummary:
        """Return the state at the current entry, for display and for scripts."""
        core, state = self._state.core, self._state
        policy = core.policy_engine.state
        return ReplaySummary(
            entry=state.last,
            hub_s=state.now_s,
            lineage=core.lineage,
            version=core.version,
            model_xxh3=f"{checksum(self.snapshot.vector.data):016x}",
            updates_applied=core.updates_applied,
            updates_rejected=core.updates_rejected,
            updates_buffered=core.policy_engine.gathering.count,
            duplicates=core.duplicates,
            rollbacks=policy.divergence.rollbacks,
            evaluation=describe_evaluation(policy.evaluations.last),
            best=describe_evaluation(policy.evaluations.best),
            devices=[_describe(member) for member in core.members.members.values()],
            unfinished_bytes=unfinished_bytes,
        )

    def _begin_at(self, checkpoint: str) -> Recovered:
        """Begin at the checkpoint with this name, or at the "latest" or "best" one."""
        fingerprint = dict(self._files.manifests).get(checkpoint, self._newest).fingerprint
        chosen = self._folder.checkpoints.choose(checkpoint, fingerprint)
        if chosen is None:
            raise StorageError(f"{self._folder.path}: no checkpoint to begin from; pass the folder of a hub's run")
        number = chosen.manifest.journal
        if self._until is not None and self._until < number:
            raise ConfigError(
                f"--until {self._until}: {chosen.name} already contains entry {number}; choose an older checkpoint"
            )
        if self._until is not None and self._until > number:
            (part, *_) = self._files.parts([(chosen.name, chosen.manifest)])
            if part.last < self._until:
                self._refuse_end(part.last)
        self.remarks += chosen.skipped
        return self._open(chosen)

    def _begin_early(self) -> Recovered:
        """Begin at the oldest checkpoint from which the journal leads to entry `until`.

        Without `until`, this is the oldest checkpoint from which the journal leads to its own end.
        """
        fingerprint = self._newest.fingerprint
        # Oldest first. Of several checkpoints at one number, the journal follows the newest.
        ours = [one for one in reversed(self._files.manifests) if one[1].fingerprint == fingerprint]
        parts = self._files.parts(list({one[1].journal: one for one in ours}.values()))
        until = parts[-1].last if self._until is None else self._until
        if until > parts[-1].last:
            self._refuse_end(parts[-1].last)
        troubles = []
        for number, part in reversed(list(enumerate(parts))):
            for name, manifest in part.starts:
                if not manifest.journal <= until <= part.last:
                    continue
                try:
                    tensors = self._folder.checkpoints.load(name, fingerprint)[1]
                except StorageError as error:
                    troubles.append(str(error))
                    continue
                self.remarks += troubles + _earlier_parts(parts[: number + 1])
                self.earlier = max((one.last for one in parts[:number] if one.last > one.first), default=None)
                found = self._open(ChosenCheckpoint(name, manifest, tensors, []))
                return self._begin_at("latest") if found.plugins and self._until is None else found
        if troubles:
            raise StorageError(f"no checkpoint can be used: {' | '.join(troubles)}")
        raise ConfigError(
            f"--until {self._until}: the journal no longer contains that entry; use a number from "
            f"{parts[-1].first} to {parts[-1].last}"
        )

    @property
    def _newest(self) -> Manifest:
        """The newest checkpoint's manifest; raises `StorageError` if there is none."""
        if self._files.manifests:
            return self._files.manifests[0][1]
        if self._files.unreadable:
            reasons = " | ".join(reason for _, reason in self._files.unreadable)
            raise StorageError(f"no checkpoint can be used: {reasons}")
        raise StorageError(f"{self._folder.path}: no checkpoint; pass the folder of a hub's run")

    def _refuse_end(self, last: int) -> None:
        raise ConfigError(f"--until {self._until}: the journal ends at entry {last}; use {last} or less")

    def _open(self, chosen: ChosenCheckpoint) -> Recovered:
        self.created_s = chosen.manifest.created_s
        if self._trust.code:
            return open_checkpoint(chosen, Rules.make_core, lambda: bytes(16), self._trust)
        found = look_at_checkpoint(chosen)
        if found.plugins:
            why = _stops_at(chosen, found.plugins)
            if self._until is not None and self._until > found.last:
                raise ConfigError(f"--until {self._until}: {why}")
            self.remarks = [*chosen.skipped, why]
        return found


def _stops_at(chosen: ChosenCheckpoint, plugins: Sequence[str]) -> str:
    """Return a warning that a replay ends at its checkpoint because plugins were not imported."""
    return (
        f"stops at {chosen.name}, version {chosen.manifest.version}: later entries need the plugins "
        f"{', '.join(plugins)}, which are not imported from a run's folder; if you trust the folder, pass "
        "trust_code=True (--trust-code)"
    )


def _earlier_parts(parts: list[JournalPart]) -> list[str]:
    """Return a remark for each earlier part that has entries. It explains how to replay the part."""
    remarks = []
    for part, following in pairwise(parts):
        if part.last == part.first:
            continue  # its later entries were removed, as usual
        name, manifest = following.starts[0]
        why = f"the hub then resumed from {name}" if manifest.journal == part.last + 1 else part.trouble
        remarks.append(
            f"use --until {part.last} to replay an earlier part, from entry {part.first} on; it ends there: {why}"
        )
    return remarks


def _describe(member: Member) -> ReplayedDevice:
    return ReplayedDevice(
        id=member.device_id,
        state=member.shown_state,
        seq_last=member.seq_last,
        updates_applied=member.updates_applied,
    )
