"""Bugs to plant in the hub and in a device, and on their way to the disk."""

from pathlib import Path

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.device.pending_push import PendingPush
from edgeasync.core.device.work_cycle import WorkCycle
from edgeasync.core.engine import log_writer
from edgeasync.core.engine.fold_queue import FoldQueue
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.core.engine.outbox import Outbox
from edgeasync.core.engine.push_intake import PushIntake
from edgeasync.core.engine.status_answers import StatusAnswers
from edgeasync.core.hub.admission import Admission
from edgeasync.core.hub.arrivals import Arrivals
from edgeasync.core.hub.divergence import DivergenceGuard
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.lifecycle import Lifecycle
from edgeasync.core.hub.membership import Membership
from edgeasync.core.hub.policy_engine import PolicyEngine
from edgeasync.core.hub.pushes import Pushes
from edgeasync.core.recovery import state
from edgeasync.core.recovery.replay import Replay
from edgeasync.durable.checkpoint import CheckpointStore
from edgeasync.durable.commit import GroupCommit
from edgeasync.durable.history_file import HistoryFile
from edgeasync.durable.history_writer import HistoryWriter
from edgeasync.durable.journal import JournalWriter, _Walk
from edgeasync.durable.run import HubRun
from tests.support.simulation.planting import Change, Mutants

CHANGES = {
    "a duplicate is applied again": (
        Change(Pushes, "arrived", "push.seq <= member.seq_last", "push.seq < member.seq_last"),
        Change(Pushes, "_check_sequence", "push.seq != member.seq_last + 1", "push.seq > member.seq_last + 1"),
    ),
    "the hub believes a device that greets again about what was answered": (
        Change(Arrivals, "greet", "member.steps_total = 0", "member.seq_last = hello.seq_answered"),
    ),
    "a device gives an unanswered push another number": (
        Change(PendingPush, "agree", "if self._said and recorded:", "if False:"),
        Change(PendingPush, "agree", "elif self._said and push.seq <= seq_last:", "elif False:"),
    ),
    "a device takes any answer for that to its push": (
        Change(PendingPush, "answered", " or ack.seq != self.push.seq", ""),
    ),
    "an answer says applied where the update waits": (
        Change(
            PolicyEngine,
            "decide",
            "Buffered(waiting) if waiting else Applied(state.version), effects",
            "Applied(state.version), effects",
        ),
    ),
    "updates that wait are dropped with a device": (
        Change(
            Admission,
            "expire",
            "if member.peer:",
            "if not self._policy_engine.state.gathering.contributions.clear():",
        ),
    ),
    "a payload is not checked": (
        Change(PushIntake, "take", "wire.checksum(payload) != push.checksum", "False"),
        Change(PushIntake, "take", "len(payload) != push.payload_bytes", "False"),
    ),
    "a lease is not renewed by what a device says": (
        Change(Admission, "renew_lease", "self._members.renew(member, now_s)", "pass"),
    ),
    "a device that was lost is not woken": (Change(Admission, "renew_lease", "if not member.live:", "if False:"),),
    "a device does not say again what was not answered": (
        Change(WorkCycle, "tick", "return self._speak(now_s)", "return self._wait(now_s) or []"),
    ),
    "a released device stays out": (
        Change(DivergenceGuard, "release", "self.state.orders.pop(voter, None)", "self.state.orders.get(voter)"),
    ),
    "an update that waits counts in spite of an order": (
        Change(PolicyEngine, "quarantine", "if one.voter == voter", "if False"),
    ),
    "an order ends with the session of its device": (
        Change(
            PolicyEngine,
            "forget",
            "self.electorate.forget_infrequent(member.device_id)",
            "self.electorate.forget_infrequent(member.device_id), "
            "self.state.divergence.orders.pop(member.voter, None)",
        ),
    ),
    # Durability, and recovery.
    "an order is not durable": (Change(log_writer, "_is_of_operator", "Wake | Order", "Wake"),),
    "an answer leaves before the sync": (
        Change(Outbox, "send", "self._waiting or (confirms and not self._is_durable)", "False"),
    ),
    "the answer to a repetition does not wait for the disk": (
        Change(HubEngine, "_send", "confirms=True", "confirms='Duplicate' not in repr(message)"),
        Change(Outbox, "send", "self._waiting or ", ""),
    ),
    "an answer does not confirm anything": (
        Change(HubEngine, "_send", "(Assignment, Ack, Welcome, Goodbye)", "Welcome"),
    ),
    "a status does not wait for the disk": (
        Change(StatusAnswers, "_describe", "self._outbox.show(", "(lambda show: show())("),
    ),
    "a number is forgotten at recovery": (
        Change(
            Membership, "load_state", "self.members = {", "for m in members: m.seq_last = 0\n    self.members = {"
        ),
    ),
    "a torn tail is taken as good": (
        Change(_Walk, "records", "digest != checksum(body[: _RECORD_HEADER.size - 8], entry)", "0"),
        Change(_Walk, "records", "payload_digest != (checksum(payload) if payload_bytes else 0)", "0"),
    ),
    "what a killed hub did not sync is not written again": (
        Change(HubRun, "open", "found.unsynced)", "[])"),
    ),
    "a segment takes the place of another before it is whole": (
        Change(JournalWriter, "_begin", "self._disk.create(_PART, padded=True)", "self._disk.create(name)"),
        Change(JournalWriter, "_begin", "(content)\n", "(content[:1]); file.sync(); file.write(parts)\n"),
        Change(JournalWriter, "_begin", "self._disk.rename(_PART, name)", "pass"),
    ),
    "the folder is not synced after a new segment": (
        Change(JournalWriter, "_begin", "self._disk.sync_folder()", "pass"),
    ),
    "the folder is not synced after a checkpoint": (
        Change(CheckpointStore, "_replace", "self._disk.sync_folder()", "pass"),
    ),
    "a checkpoint is not synced": (Change(CheckpointStore, "_replace", "file.sync()", "pass"),),
    "the journal is dropped before the manifest is durable": (
        Change(CheckpointStore, "_replace", "self._disk.sync_folder()", "pass"),
        Change(CheckpointStore, "covered", "min(self._keep, 2) - 1", "0"),
    ),
    "the journal is dropped beyond the checkpoint": (
        Change(HubRun, "save", "return self._folder.checkpoints.covered(manifest.fingerprint)", "return 1 << 60"),
    ),
    "the journal is never dropped": (
        Change(JournalWriter, "drop_through", "while self._segments:", "while False:"),
    ),
    "no checkpoint is written when the journal has grown": (
        Change(HubEngine, "on_durable", "self._log_writer.wants_checkpoint", "False"),
    ),
    "old checkpoints are kept": (
        Change(CheckpointStore, "_prune", "len(usable) > self._keep", "False"),
    ),
    "a failed sync is taken for durable": (
        Change(JournalWriter, "append", "self._file.sync", "with contextlib.suppress(OSError): self._file.sync"),
        Change(JournalWriter, "_begin", "file.sync", "with contextlib.suppress(OSError): file.sync"),
    ),
    "after a failed write the same segment is written to": (
        Change(JournalWriter, "_abandon", "if self._file is None:", "if True:"),
    ),
    "what could not be written is forgotten": (
        Change(GroupCommit, "_written", "self._waiting = batch + self._waiting", "self.durable += len(batch)"),
    ),
    "a history is not cut back to where the hub resumes": (
        Change(HistoryFile, "resume", "row.entry <= entry if", "True if"),
    ),
    "a checkpoint does not wait for the history": (
        Change(HubRun, "save", "if self.history is not None:", "if False:"),
    ),
    "the history is not synced before a checkpoint": (
        Change(HistoryWriter, "flush", "if sync and not self._off:", "if False:"),
    ),
    "rows that were written are written again": (
        Change(HistoryWriter, "flush", "rows = self._unwritten = []", "rows = list(rows)"),
    ),
    "a hub resumes under its old lineage": (Change(HubCore, "_resume", "if resumed.lineage:", "if False:"),),
    "updates that wait are lost in a checkpoint": (
        Change(
            state,
            "dump_state",
            "policy_engine=core.policy_engine.state",
            "policy_engine=msgspec.structs.replace(\n"
            "    core.policy_engine.state, gathering=type(core.policy_engine.state.gathering)()\n)",
        ),
    ),
    "payloads that wait are lost in a checkpoint": (
        Change(HubModel, "waiting", "{handle: self._updates[handle] for handle in handles}", "{}"),
    ),
    "a replay weighs updates another way": (
        Change(Replay, "_follow", "scale=scalars.scale", "scale=0.5 * scalars.scale"),
    ),
    "a checkpoint does not wait for its place in line": (
        Change(FoldQueue, "put", "self._waiting.append(effect)", "self._waiting.insert(0, effect)"),
    ),
    "a checkpoint is of the core after an event and of the model before": (
        Change(
            HubCore,
            "handle",
            "effects + self.lifecycle.save_or_stop(event, now_s)",
            "self.lifecycle.save_or_stop(event, now_s) + effects",
        ),
    ),
    "a tick that is not written down changes something": (
        Change(
            Lifecycle,
            "_save_if_due",
            "if model.version == state.saved_version:",
            "if model.version == state.saved_version and now_s >= state.save_at_s:\n"
            "        state.save_at_s = now_s + self._checkpoint_every_s\n"
            "    if model.version == state.saved_version:",
        ),
        Change(Lifecycle, "next_deadline_s", "self._policy_engine.state.version != state.saved_version", "True"),
    ),
}  # fmt: skip

MUTANTS = Mutants(CHANGES, Path(__file__).with_name("planted_seeds.json"), seeds_max=200)
