"""A hub's run on disk: its state as the newest checkpoint has it, and what the journal says came after."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgeasync.config import convert, to_table
from edgeasync.core.effects import HubEffect
from edgeasync.core.hub import HubCore
from edgeasync.core.log import Entry, read_entry
from edgeasync.core.model import Model
from edgeasync.core.published import Publisher
from edgeasync.core.replay import Replay, Sessions
from edgeasync.core.settings import HubCoreSettings
from edgeasync.core.state import HubState, restore
from edgeasync.durable.checkpoint import CheckpointStore, Manifest
from edgeasync.durable.disk import Disk
from edgeasync.durable.journal import JournalReading, Segment, cut_torn_tail, read_journal
from edgeasync.errors import ConfigError, StorageError
from edgeasync.parameters import ParameterSpec
from edgeasync.policies.policy import Judgement, Policy
from edgeasync.protocol.messages import ModelVersion


class Rules(msgspec.Struct, frozen=True):
    """What decides the future of a hub's state. A policy that is no `Policy` cannot be written down."""

    spec: ParameterSpec
    judgement: Judgement
    settings: HubCoreSettings

    def table(self) -> dict[str, Any]:
        """Return them as plain values, to be kept with every checkpoint."""
        policy = to_table(self.judgement) if isinstance(self.judgement, Policy) else None
        return {"spec": to_table(self.spec), "policy": policy, "settings": to_table(self.settings)}


def read_rules(table: dict[str, Any], where: str, judgement: Judgement | None = None) -> Rules:
    """Return the rules that a checkpoint was written under.

    `judgement` stands for a policy that could not be written down. Raises `StorageError` if they cannot be read.
    """
    try:
        policy = table["policy"]
        chosen = judgement if policy is None else convert(policy, Policy, where=f"{where}: policy")
        spec = convert(table["spec"], ParameterSpec, where=f"{where}: spec")
        settings = convert(table["settings"], HubCoreSettings, where=f"{where}: settings")
    except (KeyError, ConfigError) as error:
        raise StorageError(f"{where} was written under settings that this edgeasync does not know: {error}") from error
    if chosen is None:
        raise StorageError(f"{where} was written by a hub with a policy of its own code, which cannot be replayed")
    return Rules(spec, chosen, settings)


MakeCore = Callable[[Rules, ModelVersion, float, Sessions], HubCore]
OnEntry = Callable[[int, Entry, Sequence[HubEffect], Replay], bool]


class Recovered:
    """A hub's state, whole: what holds it, and how it was come by."""

    def __init__(self, replay: Replay, sessions: Sessions, rules: Rules, checkpoint: str) -> None:
        self.core: HubCore = replay.core
        self.model: Model = replay.model
        self.publisher: Publisher = replay.publisher
        self.sessions = sessions
        self.rules = rules
        self.checkpoint = checkpoint
        self.now_s = 0.0
        self.last = 0
        self.entries = 0
        self.segments: list[Segment] = []
        self.remarks: list[str] = []
        self.branched = False
        """Whether newer state was left behind, so that the journal does not lead here."""


def recover(
    disk: Disk,
    store: CheckpointStore,
    rules: Rules,
    make_core: MakeCore,
    draw_session: Callable[[], bytes],
    recovery: str,
) -> Recovered | None:
    """Return the state that a run's folder holds, or `None` if it holds none.

    With `recovery` "latest" that is all that was ever durable; with another, that of one checkpoint. Raises
    `StorageError` if acknowledged updates cannot be had back, `ModelMismatchError` for another model's run.
    """
    chosen = store.choose(recovery, rules.spec.fingerprint)
    if chosen is None:
        reading = read_journal(disk)
        if recovery != "latest":
            raise StorageError(f"recovery = {recovery!r}: there is no checkpoint in this run's folder")
        for record in reading.records():
            raise StorageError(
                f"the journal has record {record.number}, but there is no checkpoint to begin from; "
                "put the checkpoints back, or choose another --run"
            )
        return None
    name, manifest, arrays, remarks = chosen
    found = begin(name, manifest, arrays, read_rules(manifest.rules, name, rules.judgement), make_core, draw_session)
    found.remarks += remarks
    reading = read_journal(disk, manifest.journal)
    if recovery == "latest":
        _replay(found, reading, None)
        cut_torn_tail(disk, reading)
        found.remarks += [f"{tail.segment}: {tail.nbytes} bytes of an unfinished write were cut" for tail in reading.torn]
        found.last = reading.last
        found.segments = reading.segments
    else:
        found.branched = True
        found.last = 1 + _last_of(reading, store)
        found.segments = reading.segments
    return found


def begin(
    name: str,
    manifest: Manifest,
    arrays: dict[str, npt.NDArray[Any]],
    rules: Rules,
    make_core: MakeCore,
    draw_session: Callable[[], bytes],
) -> Recovered:
    """Return the state of a checkpoint."""
    sessions = Sessions(draw_session)
    core = make_core(rules, ModelVersion(manifest.lineage, manifest.version), manifest.now_s, sessions)
    model, publisher = restore(core, HubState.read(arrays))
    found = Recovered(Replay(core, model, publisher, sessions), sessions, rules, name)
    found.now_s, found.last = manifest.now_s, manifest.journal
    return found
