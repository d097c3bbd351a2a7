"""The story of a run, from its folder alone: the journal replayed, each entry told, nothing written.

It may be told while a hub writes to the folder, and of a copy. A journal need not lead on from every checkpoint
that is kept: where a hub went back to a checkpoint, or resumed under other rules, its numbers leap, and only the
checkpoint written then bridges that.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.hub.effects import Fold, HubEffect, HubReport, Restore, SendToDevice
from edgeasync.core.hub.events import HubReceived, PushArrived, Resumed
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.member import Member
from edgeasync.core.hub.outcomes import first_outcome, is_weighed, outcome_of
from edgeasync.core.hub.refusal import RefusalError
from edgeasync.core.recovery.decisions import check_state
from edgeasync.core.recovery.log import Entry, event_of, read_entry
from edgeasync.core.recovery.state import capture, find_difference
from edgeasync.durable.checkpoint import CheckpointStore, ChosenCheckpoint, Manifest
from edgeasync.durable.disk import FolderDisk, FolderSnapshot, ReadableDisk
from edgeasync.durable.journal import read_journal, segment_names
from edgeasync.durable.recovery import (
    NO_CODE,
    Recovered,
    Rules,
    look_at_checkpoint,
    open_checkpoint,
    read_rules,
)
from edgeasync.errors import ConfigError, ModelMismatchError, StorageError
from edgeasync.parameters import ParameterSpec
from edgeasync.plugins import Trust, refuse_modules_in
from edgeasync.policies.guards import plugins_of
from edgeasync.protocol.messages import Duplicate, FirstOutcome, Push, Refuse, Rejected
from edgeasync.protocol.wire import checksum

ATTEMPTS = 10
"""How often a folder that changes while it is looked at is looked at again."""


class ReplayedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """An update that arrived, and its outcome.

    `staleness` is in versions. `version` is the newest version after the event. `reason` says why the hub
    rejected or ignored the update. For a duplicate it is the earlier outcome. `metrics` are the device's. Of its
    `local_steps` the device took the first `delay_steps` before it used the answer to its update before.
    """

    event: str = "update"
    entry: int
    hub_s: float
    device: str
    seq: int
    base_lineage: str
    base: int
    local_steps: int
    delay_steps: int
    examples: int
    outcome: str
    reason: str
    staleness: int | None
    loss: float | None
    norm: float | None
    version: int
    metrics: dict[str, float] = {}


class ReplayedEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a version."""

    event: str = "evaluated"
    entry: int
    hub_s: float
    version: int
    loss: float
    accuracy: float | None
    best: bool


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Any other event: a device joins or is lost, an alarm, a new lineage.

    `version` is the newest version after the event. `figures` are those of an alarm.
    """

    event: str
    entry: int
    hub_s: float
    device: str = ""
    detail: str = ""
    figures: dict[str, float] = {}
    lineage: str
    version: int


Line = ReplayedUpdate | ReplayedEvaluation | RunEvent


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """Where the replay begins: after entry `entry`, at the state of `checkpoint`.

    `remarks` are sentences for a person.
    """

    event: str = "begins"
    checkpoint: str
    entry: int
    hub_s: float
    lineage: str
    version: int
    updates_applied: int
    remarks: list[str]


class _Lead(msgspec.Struct, frozen=True):
    """Checkpoints, oldest first, from which the journal leads to entry `last`, and why it leads no further."""

    starts: list[tuple[str, Manifest]]
    last: int
    trouble: str


class RunFolder(msgspec.Struct, frozen=True):
    """A run's folder at one moment: its checkpoints, newest first, and the journal as it was then.

    `unreadable` has the names of checkpoints that cannot be read, and what is wrong with each. Close the journal.
    """

    store: CheckpointStore
    journal: FolderSnapshot
    manifests: list[tuple[str, Manifest]]
    unreadable: list[tuple[str, str]]


class JournalEnd(msgspec.Struct, frozen=True):
    """What the journal leads to, by what its entries say; `trouble` is what keeps it from leading further."""

    version: int
    updates_applied: int
    lineage: str
    trouble: str


class RunReplay:
    """The story of a run. Close it when it is told."""

    def __init__(
        self,
        run: Path,
        *,
        until: int | None = None,
        checkpoint: str | None = None,
        trust_code: bool = False,
        verify: bool = False,
    ) -> None:
        """Look for where to begin: at `checkpoint`, or as early as can be; it is to end after entry `until`.

        The `checkpoint` may be "latest": what a hub that is started again resumes from. Without `trust_code` no
        plugin is imported, so a run under plugins is told up to its last checkpoint only. With `verify` the whole
        state is compared with that of each checkpoint on the way.

        Raises `StorageError` for a folder that is no run or has nothing to begin from, `ConfigError` if entry
        `until` is not to be had.
        """
        self._run = run
        self._until = until
        self._verify = verify
        self._trust = Trust(installed=True, code=True) if trust_code else NO_CODE
        self._store, self._journal, manifests = _open_run(run)
        self._checkpoints = {manifest.journal: (name, manifest) for name, manifest in reversed(manifests)}
        self.created_s = 0.0
        """When the checkpoint that it begins with was written, by the wall clock."""
        self.remarks: list[str] = []
        self.compared: list[str] = []
        """The checkpoints that the state was compared with."""
        self.earlier: int | None = None
        """The last entry of the part of the story before this one, which `until` tells; `None` without one."""
        try:
            begin = self._begin_early if checkpoint is None else self._begin_at
            self._state = begin(manifests, checkpoint or "")
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

    def close(self) -> None:
        """Let go of the journal."""
        self._journal.close()

    @property
    def spec(self) -> ParameterSpec:
        """The layout of the model."""
        return self._state.rules.spec

    @property
    def core(self) -> HubCore:
        """The hub's core where the story has come to."""
        return self._state.core

    @property
    def last(self) -> int:
        """The number of the entry that the story has come to."""
        return self._state.last

    @property
    def plugins(self) -> Sequence[str]:
        """The plugins that were not imported: what they decided is not told."""
        return self._state.plugins

    @property
    def snapshot(self) -> Snapshot:
        """The model where the story has come to."""
        return self._state.model.current

    def tell(self, on_line: Callable[[Line], bool]) -> int:
        """Tell every entry until one is the last or `on_line` says no; return the bytes of an unfinished write.

        Raises `StorageError` where the journal is damaged or, if it is verified, does not lead to a checkpoint's
        state, and `PluginError` where a plugin decides differently than in the run; what came before has been told
        then.
        """
        state, until = self._state, self._until
        if state.plugins or (until is not None and until <= state.last):
            return 0
        teller = _Teller(state.core)

        def on_entry(number: int, entry: Entry, effects: Sequence[HubEffect]) -> bool:
            told = [on_line(line) for line in teller.lines(number, entry, effects)]
            self._compare(number)
            return all(told) and number != until

        reading = read_journal(self._journal, state.last)
        state.replay(reading, on_entry)
        return sum(tail.nbytes for tail in reading.torn)

    def _compare(self, number: int) -> None:
        """Compare the state with that of the checkpoint here, if there is one; raises `PluginError`.

        That is for runs with plugins, and for those to verify: these raise `StorageError`, too.
        """
        state, (name, manifest) = self._state, self._checkpoints.get(number, ("", None))
        if manifest is None or not (self._verify or plugins_of(state.rules.policy)):
            return
        if read_rules(manifest, name, self._trust) != state.rules:
            return
        try:
            tensors = self._store.load(name, manifest.fingerprint)[1]
        except (StorageError, ModelMismatchError):
            if self._verify and name in dict(self._store.manifests()[0]):
                raise
            return  # a running hub has dropped it
        chosen = ChosenCheckpoint(name, manifest, tensors, [])
        saved = open_checkpoint(chosen, Rules.make_core, lambda: bytes(16), self._trust)
        check_state(state.core, state.model, saved.core, saved.model, number)
        if self._verify:
            now, then = [capture(one.core, one.model, one.publisher, number, 0.0) for one in (state, saved)]
            if difference := find_difference(now, then, self.spec):
                raise StorageError(
                    f"{name}: the journal leads to another state at entry {number}: {difference}; put the folder "
                    "back from a backup, or resume from another checkpoint"
                )
            self.compared.append(name)

    def devices(self) -> list[dict[str, Any]]:
        """Return what the status says of the devices at the point that the story has come to."""
        found: list[dict[str, Any]] = self._state.core.status(self._state.now_s)["devices"]
        return found

    def summary(self) -> dict[str, Any]:
        """Return the state that the story has come to, for people and scripts."""
        core, state = self._state.core, self._state
        judged = core.policy_engine.describe()
        return {
            "entry": state.last,
            "hub_s": state.now_s,
            "lineage": core.lineage,
            "version": core.version,
            "model_xxh3": f"{checksum(self.snapshot.vector.data):016x}",
            "updates_applied": core.updates_applied,
            "updates_rejected": core.updates_rejected,
            "updates_buffered": core.policy_engine.gathering.count,
            "duplicates": core.duplicates,
            "rollbacks": judged["rollbacks"],
            "evaluation": judged["evaluation"],
            "best": judged["best"],
            "devices": [_describe(member) for member in core.members.members.values()],
        }

    def _begin_at(self, manifests: list[tuple[str, Manifest]], checkpoint: str) -> Recovered:
        """Begin at the checkpoint that was asked for."""
        fingerprint = dict(manifests).get(checkpoint, manifests[0][1]).fingerprint
        chosen = self._store.choose(checkpoint, fingerprint)
        if chosen is None:
            raise StorageError(f"{self._run}: has no checkpoint to begin from")
        number = chosen.manifest.journal
        if self._until is not None and self._until < number:
            raise ConfigError(f"--until {self._until}: {chosen.name} is of entry {number} already; begin earlier")
        if self._until is not None and self._until > number:
            (lead, *_) = _leads(self._journal, [(chosen.name, chosen.manifest)])
            if lead.last < self._until:
                self._refuse_end(lead.last)
        self.remarks += chosen.skipped
        return self._open(chosen)

    def _begin_early(self, manifests: list[tuple[str, Manifest]], _: str) -> Recovered:
        """Begin at the oldest checkpoint from which the journal leads on to the end, or to entry `until`."""
        fingerprint = manifests[0][1].fingerprint
        newest: dict[int, tuple[str, Manifest]] = {}
        for start in manifests:
            if start[1].fingerprint == fingerprint:
                newest.setdefault(start[1].journal, start)  # of one number, the journal follows the newest
        leads = _leads(self._journal, [newest[number] for number in sorted(newest)])
        until = leads[-1].last if self._until is None else self._until
        if until > leads[-1].last:
            self._refuse_end(leads[-1].last)
        troubles = []
        for lead in reversed(leads):
            for name, manifest in lead.starts:
                if not manifest.journal <= until <= lead.last:
                    continue
                try:
                    tensors = self._store.load(name, fingerprint)[1]
                except StorageError as error:
                    troubles.append(str(error))
                    continue
                before = leads[: leads.index(lead)]
                self.remarks += troubles + _earlier_parts([*before, lead])
                self.earlier = max(
                    (one.last for one in before if one.last > one.starts[0][1].journal), default=None
                )
                found = self._open(ChosenCheckpoint(name, manifest, tensors, []))
                if found.plugins and self._until is None:
                    return self._begin_at(manifests, "latest")
                return found
        if troubles:
            raise StorageError(f"no checkpoint can be used: {' | '.join(troubles)}")
        first = leads[-1].starts[0][1].journal
        raise ConfigError(
            f"--until {self._until}: is not to be had any more; the story begins behind entry {first}"
        )

    def _refuse_end(self, last: int) -> None:
        raise ConfigError(f"--until {self._until}: the journal leads to entry {last} and no further")

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


class _Teller:
    """Makes lines of entries that have been applied to a core."""

    def __init__(self, core: HubCore) -> None:
        self._core = core
        self._duplicates = core.duplicates

    def lines(self, number: int, entry: Entry, effects: Sequence[HubEffect]) -> Iterator[Line]:
        """Yield what is to be told of an entry: first what came in, then what followed."""
        core, event = self._core, entry.event
        repeated, self._duplicates = core.duplicates > self._duplicates, core.duplicates
        if isinstance(event, PushArrived):
            yield self._update(number, entry, effects, event.push, event.norm, repeated=repeated)
        elif (
            repeated
            and isinstance(received := event_of(entry), HubReceived)
            and isinstance(received.message, Push)
        ):
            yield self._update(number, entry, effects, received.message, None, repeated=True)
        elif isinstance(event, Resumed):
            detail = "resumed, in a lineage of its own" if event.lineage else "the folder can be written again"
            yield self._happening(number, entry, "resumed", detail=detail)
        for effect in effects:
            match effect:
                case HubReport(event="evaluated"):
                    yield self._evaluation(number, entry)
                case HubReport():
                    yield self._happening(
                        number, entry, effect.event, effect.device_id, effect.detail, figures=effect.figures
                    )
                case Restore():
                    detail = f"an earlier model is now version {effect.number}"
                    yield self._happening(number, entry, "rolled_back", detail=detail)
                case Fold() if not isinstance(event, PushArrived):
                    detail = f"{len(effect.handles)} updates that waited are now version {effect.number}"
                    yield self._happening(number, entry, "folded", detail=detail)

    def _update(
        self,
        number: int,
        entry: Entry,
        effects: Sequence[HubEffect],
        push: Push,
        norm: float | None,
        *,
        repeated: bool,
    ) -> ReplayedUpdate:
        member = self._sender(entry, push)
        outcome, reason = _outcome(effects)
        if not reason and outcome == "refused" and self._core.stopped:
            reason = "stopped"
        if repeated:
            outcome = "duplicate"
        first = first_outcome(effects)
        weighed = first is not None and is_weighed(first)
        return ReplayedUpdate(
            entry=number,
            hub_s=entry.now_s,
            device="" if member is None else member.device_id,
            seq=push.seq,
            base_lineage=push.base.lineage,
            base=push.base.number,
            local_steps=push.local_steps,
            delay_steps=push.overlap_steps,
            examples=push.examples,
            outcome=outcome,
            reason=reason,
            staleness=member.measurements.staleness if weighed and member is not None else None,
            loss=push.loss_mean,
            norm=None if norm is None or (math.isnan(norm) and not weighed) else norm,
            version=entry.version,
            metrics=push.metrics or {},
        )

    def _sender(self, entry: Entry, push: Push) -> Member | None:
        try:
            return self._core.members.by_session(push.session)
        except RefusalError:
            return self._core.members.by_peer(getattr(entry.event, "peer", b""))

    def _evaluation(self, number: int, entry: Entry) -> ReplayedEvaluation:
        progress = self._core.policy_engine.state.evaluations
        last = progress.last
        assert last is not None
        return ReplayedEvaluation(
            entry=number,
            hub_s=entry.now_s,
            version=last.number,
            loss=last.loss,
            accuracy=last.accuracy,
            best=progress.best is last,
        )

    def _happening(
        self,
        number: int,
        entry: Entry,
        event: str,
        device: str = "",
        detail: str = "",
        *,
        figures: dict[str, float] | None = None,
    ) -> RunEvent:
        return RunEvent(
            event=event,
            entry=number,
            hub_s=entry.now_s,
            device=device,
            detail=detail,
            figures=figures or {},
            lineage=self._core.lineage,
            version=entry.version,
        )


def _stops_at(chosen: ChosenCheckpoint, plugins: Sequence[str]) -> str:
    """Return why a replay goes no further than its checkpoint."""
    return (
        f"stops at {chosen.name}, version {chosen.manifest.version}: what came later was decided by "
        f"{', '.join(plugins)}, and no code that a run's folder names is imported; if you trust the folder, allow "
        "it with trust_code=True (--trust-code)"
    )


def look_at(run: Path) -> RunFolder:
    """Return what a run's folder holds, while a hub may be at work there; raises `StorageError`.

    A hub drops what its checkpoints cover. So the journal is opened between two looks at them that are the same.
    """
    refuse_modules_in(run)
    disk = FolderDisk(run)
    store = CheckpointStore(disk, keep=1)
    checkpoints = store.manifests()
    for _ in range(ATTEMPTS):
        try:
            journal = FolderSnapshot(run, segment_names(disk))
        except OSError as error:
            raise StorageError(f"{run}: the journal cannot be read: {error.strerror}; fix its rights") from error
        before, checkpoints = checkpoints, store.manifests()
        if before == checkpoints:
            return RunFolder(store, journal, *checkpoints)
        journal.close()
    raise StorageError(f"{run}: changes faster than it can be read; look at a copy")


def follow_journal(journal: ReadableDisk, start: Manifest) -> JournalEnd:
    """Return what the journal leads to from a checkpoint: its entries are read, and nothing is computed again."""
    version, updates_applied, lineage, trouble = start.version, start.updates_applied, start.lineage, ""
    try:
        for record in read_journal(journal, start.journal).records():
            entry = read_entry(record.entry)
            version = entry.version
            updates_applied += sum(len(fold.weights) for fold in entry.folds)
            if isinstance(entry.event, Resumed):
                lineage = entry.event.lineage or lineage
    except StorageError as error:
        trouble = str(error)
    return JournalEnd(version, updates_applied, lineage, trouble)


def _open_run(run: Path) -> tuple[CheckpointStore, FolderSnapshot, list[tuple[str, Manifest]]]:
    """Return a run's checkpoints and its journal; raises `StorageError` if there is none to begin from."""
    if not run.is_dir():
        raise StorageError(f"{run}: no such folder; give the folder of a hub's run")
    folder = look_at(run)
    if folder.manifests:
        return folder.store, folder.journal, folder.manifests
    folder.journal.close()
    if folder.unreadable:
        raise StorageError(f"no checkpoint can be used: {' | '.join(reason for _, reason in folder.unreadable)}")
    raise StorageError(f"{run}: holds no checkpoint; give the folder of a hub's run")


def _leads(journal: ReadableDisk, starts: list[tuple[str, Manifest]]) -> list[_Lead]:
    """Read the journal from the first of these checkpoints, oldest first, and again from each it does not lead to.

    It leads to one if it has what comes between, and the same version there.
    """
    leads = []
    while starts:
        versions = {manifest.journal: manifest.version for _, manifest in starts}
        last, trouble = starts[0][1].journal, ""
        try:
            for record in read_journal(journal, last).records():
                version = read_entry(record.entry).version
                if versions.get(record.number, version) != version:
                    trouble = f"entry {record.number} does not lead to the checkpoint that was written there"
                    break
                last = record.number
        except StorageError as error:
            trouble = str(error)
        leads.append(_Lead([start for start in starts if start[1].journal <= last], last, trouble))
        starts = [start for start in starts if start[1].journal > last]
    return leads


def _earlier_parts(leads: list[_Lead]) -> list[str]:
    """Say of each lead but the last, if it leads anywhere, why it does not lead further."""
    remarks = []
    for lead, following in pairwise(leads):
        first = lead.starts[0][1].journal
        if lead.last == first:
            continue  # what came after it was dropped, as is usual
        name, manifest = following.starts[0]
        why = f"the hub resumed from {name} then" if manifest.journal == lead.last + 1 else lead.trouble
        remarks.append(f"--until {lead.last} tells an earlier part, from entry {first} on; behind it: {why}")
    return remarks


def _outcome(effects: Sequence[HubEffect]) -> tuple[str, str]:
    """Return what an update was answered, and why."""
    outcome = outcome_of(effects)
    if outcome is None:
        answers = [effect.message for effect in effects if isinstance(effect, SendToDevice)]
        return "refused", next((answer.code for answer in answers if isinstance(answer, Refuse)), "")
    if isinstance(outcome, Duplicate):
        return "duplicate", _word(outcome.first)
    return _word(outcome), outcome.reason if isinstance(outcome, Rejected) else ""


def _word(outcome: FirstOutcome) -> str:
    return str(outcome.__struct_config__.tag)


def _describe(member: Member) -> dict[str, Any]:
    return {
        "id": member.device_id,
        "state": member.shown_state,
        "seq_last": member.seq_last,
        "updates_applied": member.updates_applied,
    }
