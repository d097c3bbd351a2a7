"""Recover a hub's state: load a checkpoint, then replay the journal."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from edgeasync.config import convert, to_table
from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.hub.effects import HubEffect
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import CodecSettings, HubCoreSettings
from edgeasync.core.recovery.log import Entry, read_entry
from edgeasync.core.recovery.replay import Replay, Sessions
from edgeasync.core.recovery.state import dump_state, load_state, restore, restore_core, succeed
from edgeasync.durable.checkpoint import ChosenCheckpoint, Manifest
from edgeasync.durable.history_writer import REPLAYED_ROWS, HistoryWriter
from edgeasync.durable.journal import Appended, JournalReading, Segment, remove_torn_headers
from edgeasync.durable.run_folder import RunFolder
from edgeasync.errors import ConfigError, ModelMismatchError, PluginError, StorageError
from edgeasync.parameters import ParameterSpec
from edgeasync.plugins import Trust, name_of
from edgeasync.policies.guards import plugins_of
from edgeasync.policies.kinds import plugins_named
from edgeasync.policies.policy import Policy, PolicySet
from edgeasync.protocol.codecs import FLOAT16, SixteenBits, plugin_parts
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import ModelVersion

NO_CODE = Trust()
"""The `Trust` of commands that only read a folder. They do not import the plugins that the folder
names.
"""


class Rules(msgspec.Struct, frozen=True):
    """Everything that determines how a hub's state evolves, except the events.

    If the rules are not `recordable`, their policy may contain parts that are not registered under
    a name. The policy is then not recorded, so the run cannot be opened again.
    """

    spec: ParameterSpec
    policy: PolicySet
    settings: HubCoreSettings
    ships_graph: bool = False
    recordable: bool = True

    def make_core(
        self,
        version: ModelVersion,
        now_s: float,
        sessions: Sessions,
        *,
        training: dict[str, Any] | None = None,
        graph: ShippedGraph | None = None,
    ) -> HubCore:
        """Return a new core.

        If the rules ship a graph and `graph` is `None`, the core gets an empty graph. Decisions
        depend on whether there is a graph, but not on its content.
        """
        if graph is None and self.ships_graph:
            graph = ShippedGraph(b"")
        return HubCore(
            spec=self.spec,
            training=training or {},
            policy=self.policy,
            settings=self.settings,
            version=version,
            graph=graph,
            make_session=sessions,
            now_s=now_s,
        )

    def table(self) -> dict[str, Any]:
        """Return the rules as plain values. A policy that cannot be recorded is left out."""
        return {
            "spec": to_table(self.spec),
            "policy": to_table(self.policy) if self.recordable else None,
            "settings": to_table(self.settings),
            "ships_graph": self.ships_graph,
        }


def read_rules(manifest: Manifest, where: str, trust: Trust = NO_CODE) -> Rules:
    """Return the rules that a checkpoint has recorded.

    Raises `StorageError` if they cannot be read. Raises `PluginError` if a plugin is not installed
    or may not be imported.
    """
    table = manifest.rules
    try:
        if table["policy"] is None:
            raise StorageError(
                f"{where}: the run used policy objects from a program, and they cannot be recreated here; "
                "choose another run folder"
            )
        policy = convert(table["policy"], Policy, where="policy", find=trust.find_policy)
        spec = convert(table["spec"], ParameterSpec, where="spec")
        settings = convert(table["settings"], HubCoreSettings, where="settings")
        ships_graph = bool(table["ships_graph"])
    except PluginError as error:
        raise PluginError(f"{where}: {error}") from error
    except (KeyError, ConfigError) as error:
        raise StorageError(
            f"{where}: contains settings that this edgeasync cannot read ({error}); "
            "use the version of edgeasync that wrote it, or a newer one"
        ) from error
    return Rules(spec, policy, settings, ships_graph)


MakeCore = Callable[[Rules, ModelVersion, float, Sessions], HubCore]
"""Creates a new core for a version and a time. It is `Rules.make_core` or a wrapper of it."""

OnEntry = Callable[[int, Entry, Sequence[HubEffect]], bool]
"""Receives the number and effects of each entry that was applied; returns whether to continue."""


class Recovered:
    """A hub's recovered state.

    `last` is the number of the last journal entry. `segments` contains the journal's segments.
    `unsynced` contains the journal records that must be written again. `remarks` contains warnings.
    If `branches` is true, replaying the journal does not lead to this state, so a checkpoint must
    be written before anything else.

    `plugins` contains the names of plugins that were not imported. If there are any, the state is
    that of the checkpoint. It can only be displayed, and no entries can be replayed from it.
    """

    def __init__(
        self,
        chosen: ChosenCheckpoint,
        rules: Rules,
        core: HubCore,
        sessions: Sessions,
        plugins: Sequence[str] = (),
        *,
        float16: SixteenBits = FLOAT16,
    ) -> None:
        self.rules = rules
        self._float16 = float16
        self.checkpoint = chosen.name
        self.plugins = plugins
        self.core = core
        vector = restore_core(chosen.tensors, core) if plugins else np.zeros(rules.spec.length, np.float32)
        self.model = HubModel(rules.spec, vector, chosen.manifest.version, rules.policy, float16)
        self.publisher = Publisher(rules.spec, self.model, rules.settings.codec)
        if not plugins:
            restore(chosen.tensors, self.core, self.model, self.publisher)
        self.sessions = sessions
        self.now_s = chosen.manifest.now_s
        self.last = chosen.manifest.journal
        self.entries = 0
        self.segments: list[Segment] = []
        self.unsynced: list[Appended] = []
        self.remarks = list(chosen.skipped)
        self.branches = False

    def replay(self, reading: JournalReading, on_entry: OnEntry) -> None:
        """Apply the journal's entries until `on_entry` returns false; raises `StorageError`."""
        assert not self.plugins
        replay = self._replay()
        for record in reading.records():
            entry = read_entry(record.entry)
            effects = replay.apply(record.number, entry, bytes(record.payload))
            self.now_s, self.last = entry.now_s, record.number
            self.entries += 1
            if not on_entry(record.number, entry, effects):
                return

    def go_on_under(self, rules: Rules, make_core: MakeCore) -> None:
        """Switch to other rules if they differ from the current ones.

        If the policy or the codecs have changed, the new ones start without the state of the old
        ones. The current model, including all acknowledged updates, is always kept. So are the
        devices and the last outcome of each device.

        Raises `ModelMismatchError` if the frozen arrays of the hub's model differ from those of the
        run.
        """
        if rules == self.rules:
            return
        _check_frozen(self.rules.settings, rules.settings)
        old, minutes = self.core, (self.rules.settings.stop.minutes, rules.settings.stop.minutes)
        keeps = (rules.policy, rules.settings.codec) == (self.rules.policy, self.rules.settings.codec)
        if not keeps:
            self._replay().fold_all(self.now_s)
        core = make_core(rules, ModelVersion(old.lineage, old.version), self.now_s, self.sessions)
        if keeps:
            load_state(core, dump_state(old))
            if rules.settings.stop != self.rules.settings.stop:
                core.policy_engine.state.evaluations.reached = ""  # the new stop condition may not be met
            core.lifecycle.state.save_at_s = self.now_s + rules.settings.checkpoint.every_s
            if minutes[0] is None or minutes[1] is None:
                core.lifecycle.state.stop_at_s = math.inf if minutes[1] is None else self.now_s + 60.0 * minutes[1]
            else:
                core.lifecycle.state.stop_at_s += 60.0 * (minutes[1] - minutes[0])
        else:
            succeed(core, old)
            self.model = HubModel(rules.spec, self.model.current.vector, core.version, rules.policy, self._float16)
            self.publisher = Publisher(rules.spec, self.model, rules.settings.codec)
        self.core, self.rules = core, rules
        self.last += not self.branches
        self.branches, self.unsynced = True, []

    def _replay(self) -> Replay:
        return Replay(self.core, self.model, self.publisher, self.sessions)


def open_checkpoint(
    chosen: ChosenCheckpoint,
    make_core: MakeCore,
    draw_session: Callable[[], bytes],
    trust: Trust = NO_CODE,
    *,
    float16: SixteenBits = FLOAT16,
) -> Recovered:
    """Return the state in a checkpoint; raises `PluginError` if a plugin may not be imported."""
    rules = read_rules(chosen.manifest, chosen.name, trust)
    return _open(chosen, rules, make_core, draw_session, float16=float16)


def look_at_checkpoint(chosen: ChosenCheckpoint) -> Recovered:
    """Return the state in a checkpoint for display. Plugins are listed but not imported."""
    manifest = chosen.manifest
    policy, settings = manifest.rules.get("policy"), manifest.rules.get("settings")
    codec = settings.get("codec") if isinstance(settings, dict) else None
    plugins = plugins_named(policy)
    if isinstance(codec, dict):
        plugins += [name for value in codec.values() if isinstance(value, str) for name in plugin_parts(value)]
    if plugins:
        plain = {"policy": to_table(Policy())}
        if isinstance(settings, dict):
            plain["settings"] = settings | {"codec": to_table(CodecSettings())}
        manifest = msgspec.structs.replace(manifest, rules=manifest.rules | plain)
    return _open(chosen, read_rules(manifest, chosen.name), Rules.make_core, lambda: bytes(16), plugins)


def _open(
    chosen: ChosenCheckpoint,
    rules: Rules,
    make_core: MakeCore,
    draw_session: Callable[[], bytes],
    plugins: Sequence[str] = (),
    *,
    float16: SixteenBits = FLOAT16,
) -> Recovered:
    sessions = Sessions(draw_session)
    version = ModelVersion(chosen.manifest.lineage, chosen.manifest.version)
    core = make_core(rules, version, chosen.manifest.now_s, sessions)
    return Recovered(chosen, rules, core, sessions, plugins, float16=float16)


def recover(
    folder: RunFolder,
    rules: Rules,
    make_core: MakeCore,
    draw_session: Callable[[], bytes],
    *,
    recovery: str = "latest",
    on_entry: OnEntry = lambda *_: True,
    history: HistoryWriter | None = None,
    trust_code: bool = False,
    float16: SixteenBits = FLOAT16,
) -> Recovered | None:
    """Recover the state of a run from its folder; return `None` if there is no checkpoint.

    If `recovery` is "latest", the state includes all durable data. If `recovery` is "best" or a
    checkpoint's name, the state is that of the checkpoint. The `history` is truncated to the same
    state. Plugins that the folder names may be imported if `rules` also uses them or if they are
    installed. With `trust_code`, any plugin may be imported.

    Raises `StorageError` if durable data cannot be recovered, and `ModelMismatchError` if the run
    belongs to another model.
    """
    chosen = folder.checkpoints.choose(recovery, rules.spec.fingerprint)
    if chosen is None:
        _refuse_journal_alone(folder)
        return None
    known = {name_of(type(part)): type(part) for part in plugins_of(rules.policy).values()}
    trust = Trust(known=known, installed=True, code=trust_code)
    found = open_checkpoint(chosen, make_core, draw_session, trust, float16=float16)
    if history is not None:
        found.remarks += history.resume(
            found.last, found.now_s, found.core.policy_engine.state.gathering.contributions
        )
        on_entry = _noting(history, found, on_entry)
    reading = folder.journal(chosen.manifest.journal)
    if recovery == "latest":
        found.replay(reading, on_entry)
        remove_torn_headers(folder.disk, reading)
        found.unsynced = reading.unsynced
        for tail in filter(lambda tail: tail.nbytes, reading.torn):
            found.remarks.append(
                f"{tail.segment}: ignored the last {tail.nbytes} bytes, which belong to an unfinished write"
            )
    else:
        found.branches = True
        found.last = 1 + _last_number(reading, folder)
    found.segments = reading.segments
    return found


def _noting(history: HistoryWriter, found: Recovered, on_entry: OnEntry) -> OnEntry:
    """Wrap `on_entry` so that it also adds rows to the history."""

    def noted(number: int, entry: Entry, effects: Sequence[HubEffect]) -> bool:
        history.note(found.core, number, entry.event, effects, entry.now_s)
        if history.waiting >= REPLAYED_ROWS:
            history.flush(number)
        return on_entry(number, entry, effects)

    return noted


def _last_number(reading: JournalReading, folder: RunFolder) -> int:
    """Return the highest entry number in the journal and the checkpoints that can be read."""
    numbers = [manifest.journal for _, manifest in folder.checkpoints.manifests()[0]]
    try:
        numbers += [record.number for record in reading.records()]
    except StorageError:
        numbers += [
            segment.first for segment in reading.segments
        ]  # the user chose a checkpoint, so this is no error
    return max(numbers)


def _check_frozen(before: HubCoreSettings, now: HubCoreSettings) -> None:
    old, new = before.frozen_arrays, now.frozen_arrays
    if now.frozen == "warn" or old is None or new is None or old.framework != new.framework or old == new:
        return
    raise ModelMismatchError(
        "the frozen arrays of the hub's model differ from those that this run was trained with; load the same "
        "base model, choose another run folder, or set hub.frozen = 'warn'"
    )


def _refuse_journal_alone(folder: RunFolder) -> None:
    for record in folder.journal().records():
        raise StorageError(
            f"the journal starts with record {record.number}, but its checkpoints are missing; restore them from "
            "a backup, or choose another run folder"
        )
