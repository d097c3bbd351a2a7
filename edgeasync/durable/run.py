"""Open, begin and save a hub's run in a folder."""

import math
from collections.abc import Callable
from typing import Literal

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.recovery.replay import Sessions
from edgeasync.core.recovery.state import HubState, capture
from edgeasync.durable.checkpoint import Manifest
from edgeasync.durable.disk import Disk
from edgeasync.durable.history_writer import HistoryWriter
from edgeasync.durable.journal import SEGMENT_BYTES_MAX, JournalWriter
from edgeasync.durable.past_curve import read_past_curve
from edgeasync.durable.recovery import MakeCore, OnEntry, Rules, recover
from edgeasync.durable.run_folder import RunFolder
from edgeasync.errors import StorageError
from edgeasync.parameters import Vector
from edgeasync.policies.policy import check_recordable
from edgeasync.protocol.codecs import FLOAT16, SixteenBits
from edgeasync.protocol.feed import HistoryPoint
from edgeasync.protocol.messages import ModelVersion
from edgeasync.version import VERSION

Durability = Literal["journal", "checkpoint"]


class HubRun:
    """A run under `rules`, on a disk to which no other process writes.

    After `open`, it contains the hub's state.

    Raises `ConfigError` if the policy cannot be recorded.

    `journal` writes all later entries. `now_s` is the time of the core's clock at the recovered
    state. `entries` is the number of replayed entries. `checkpoint` is the name of the checkpoint
    from which the run was resumed, or empty. `remarks` contains warnings. `past` is the learning
    curve before this start. `history` is `None` if the run records no rows. With `trust_code`,
    plugins that are named only in the folder are imported.
    """

    core: HubCore
    sessions: Sessions
    model: HubModel
    publisher: Publisher
    journal: JournalWriter

    def __init__(
        self,
        disk: Disk,
        rules: Rules,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        *,
        history_rows_max: int = 0,
        trust_code: bool = False,
        float16: SixteenBits = FLOAT16,
    ) -> None:
        if rules.recordable:
            check_recordable(rules.policy)
        self.now_s = 0.0
        self.entries = 0
        self.checkpoint = ""
        self.remarks: list[str] = []
        self.past: list[HistoryPoint] = []
        self.history = HistoryWriter(disk, history_rows_max) if history_rows_max else None
        self._rules = rules
        self._trust_code = trust_code
        self._float16 = float16
        self._folder = RunFolder(disk=disk, keep=rules.settings.checkpoint.keep)
        self._segment_bytes_max = segment_bytes_max
        self._last = 0
        self._software = ""

    def open(
        self,
        make_core: MakeCore,
        initial: Callable[[], tuple[Vector, int]],
        *,
        lineage: str,
        draw_session: Callable[[], bytes],
        created_s: float,
        on_entry: OnEntry = lambda *_: True,
    ) -> None:
        """Recover the state, or begin a new lineage with the `initial` model and its version.

        When this returns, all recovered data is durable. If replaying the journal would not lead to
        the recovered state, a checkpoint with the time `created_s` has been written.

        Raises `StorageError` if the folder cannot be read or written, and `ModelMismatchError` if
        it belongs to another model.
        """
        self._software = f"edgeasync {VERSION}"
        rules = self._rules
        recovery = rules.settings.checkpoint.recovery
        found = recover(
            self._folder,
            rules,
            make_core,
            draw_session,
            recovery=recovery,
            on_entry=on_entry,
            history=self.history,
            trust_code=self._trust_code,
            float16=self._float16,
        )
        if found is None:
            if self.history is not None:
                self.remarks += self.history.begin()
            vector, number = initial()
            self.sessions = Sessions(draw_session)
            self.core = make_core(rules, ModelVersion(lineage, number), 0.0, self.sessions)
            self.model = HubModel(rules.spec, vector, number, rules.policy, self._float16)
            self.publisher = Publisher(rules.spec, self.model, rules.settings.codec)
        else:
            found.go_on_under(rules, make_core)
            if self.history is not None and not found.core.policy_engine.gathering.count:
                self.history.note_folded(found.last, found.now_s)
            self.core, self.model, self.publisher = found.core, found.model, found.publisher
            self.sessions = found.sessions
            self.now_s, self.entries, self.checkpoint = found.now_s, found.entries, found.checkpoint
            self.remarks, self._last = found.remarks, found.last
            self.past = read_past_curve(self._folder.disk)
        try:
            if found is None or found.branches:
                self.save(capture(self.core, self.model, self.publisher, self._last, self.now_s), created_s)
            segments = [] if found is None else found.segments
            self.journal = JournalWriter(self._folder.disk, self._last + 1, segments, self._segment_bytes_max)
            if found is not None:
                self.journal.secure(found.unsynced)
        except OSError as error:
            raise StorageError(
                f"cannot write to the run's folder: {error.strerror or error}; free space or check its permissions"
            ) from error

    def save(self, state: HubState, created_s: float) -> int:
        """Write the history, then a checkpoint with the time `created_s`; raises `OSError`.

        Return the number up to which journal records may be removed.
        """
        if state.entry is None:
            self._last += 1  # leave a gap, so that no later journal seems to continue an earlier checkpoint
        if self.history is not None:
            self.history.flush(math.inf if state.entry is None else state.entry, sync=True)
        evaluation = state.evaluation
        manifest = Manifest(
            software=self._software,
            fingerprint=self._rules.spec.fingerprint,
            lineage=state.lineage,
            version=state.snapshot.number,
            journal=self._last if state.entry is None else state.entry,
            now_s=state.now_s,
            updates_applied=state.updates_applied,
            loss=None if evaluation is None else evaluation.loss,
            accuracy=None if evaluation is None else evaluation.accuracy,
            created_s=created_s,
            rules=self._rules.table(),
        )
        self._folder.checkpoints.write(manifest, state.tensors)
        return self._folder.checkpoints.covered(manifest.fingerprint)
