"""Checks of a simulated fleet, whatever happens to it; a check that fails raises `AssertionError`.

The checks trust nothing that the hub says of itself: they count updates in the model, and compare a recovered hub
with what they saw of it before the crash.
"""

import copy

import numpy as np
import xxhash

from edgeasync.core.hub.effects import Discard, Fold, HubReport, Restore, SendStatus
from edgeasync.core.hub.events import HubReceived, Revoked
from edgeasync.core.recovery.state import dump_state
from edgeasync.durable.history import Correction, UpdateRow, correct, read_rows
from edgeasync.durable.history_writer import row_of
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Ack,
    Applied,
    Assignment,
    Buffered,
    Duplicate,
    ModelVersion,
    Order,
    Rejected,
    Status,
)
from tests.support.simulation.marks import SLOTS

MESSAGES_HELD_MAX = 40
"""Messages that may wait for the disk, for each device: answers, and refusals behind them."""


TOLD = {"quarantine": "excluded", "release": "released"}
"""The hub's event of each order."""


class Memory:
    """Observations of the hub that follow its disk: a disk that is put back has those of its earlier state."""

    def __init__(self):
        self.decided = {}
        """Mark and outcome of each decided push, by device and number, whether an answer has left or not."""
        self.entries = {}
        """By the same: the number of the log's entry with the decision."""
        self.acknowledged = {}
        """The decisions whose answer has left the hub: these are promises."""
        self.promised = {}
        """By mark: the same promises, kept even when the hub may forget the device."""
        self.told = {}
        """By mark: what its own device was told."""
        self.history = {}
        """By lineage and version: the marks that were folded into it."""
        self.where = {}
        """By mark: the lineage and version that it was folded into."""
        self.handles = {}
        """By the handle that an update was given: its mark."""
        self.excused = set()
        """Marks that a rollback or an operator's order has dropped while they waited."""
        self.orders = []
        """The orders that were obeyed: the number of the log's entry, the connection, the device and the order."""
        self.given = set()
        """Lineages and versions that devices were given."""
        self.shown = set()
        """Lineages and versions that a status has shown."""
        self.applied_shown = 0
        """Updates that a status has shown as applied."""
        self.rows = {}
        """By the number of the log's entry: device, number and outcome of the update that was decided there."""
        self.row_of, self.corrections = {}, []
        """Of updates that waited: by handle the entry of the decision; and what later entries made of which."""
        self.rows_lost = False
        """Whether a checkpoint was written while the history could not be."""
        self.states = {}
        """By the number of a log's entry: a hash of what the core was after it."""

    @property
    def excluded(self):
        """The devices that an operator has excluded."""
        newest = {device: order for _, _, device, order in self.orders}
        return {device for device, order in newest.items() if order == "quarantine"}

    def copy(self):
        memory = copy.copy(self)
        for name, value in vars(self).items():
            setattr(memory, name, copy.copy(value))
        return memory


class Checks:
    """What must hold, whatever happens."""

    def __init__(self, world):
        self._world = world
        self.memory = Memory()
        self._marks = {}
        """By device, checksum of the payload and loss: an update's mark."""
        self._said = set()
        """All that ever left the hub: device, number, mark and outcome."""
        self._made = set()
        """Lineages and versions that were made, other than in a replay."""
        self._grown = self._grown_max = 0
        """Bytes written to the journal while the last checkpoint was, and while any was, at most."""
        self._models = {}
        """By lineage and version: the hash of the model."""
        self._published = {}
        self._off_chain = set()
        """The same of what devices are given, where that is something else."""
        self._parents = {}
        """By lineage: the one that it branched off, and the last version they share."""
        self._assigned = {}
        self._times_s = {}
        """By core: the latest time that it was given."""

    # -- time ------------------------------------------------------------------------------------------------

    def time_is(self, core, now_s):
        """A core is given the time, which never goes back: leases, deadlines and replay rely on that."""
        before_s = self._times_s.get(core, now_s)
        assert now_s >= before_s, f"time goes back by {before_s - now_s:g} s, to {now_s!r}"
        self._times_s[core] = now_s

    # -- updates ---------------------------------------------------------------------------------------------

    def pushed(self, device, push):
        """Note an update that a device has made, perhaps once more; return its mark."""
        mark = (device.device_id, device.training.trainer.updates)
        return self._marks.setdefault((device.device_id, push.checksum, repr(push.loss_mean)), mark)

    def before_event(self, hub, event):
        push = getattr(event, "push", None)
        if push is None or not hasattr(event, "handle"):
            return None
        device_id = event.peer.partition(b"#")[0].decode()
        waiting = self._waiting(hub.core)
        mark = self.memory.handles[event.handle] = self._marks[device_id, push.checksum, repr(push.loss_mean)]
        return mark, waiting, hub.core.duplicates, hub.core.messages_refused

    def after_event(self, hub, event, before, effects):
        for effect in effects:
            if isinstance(effect, HubReport) and effect.event == "joined":
                self._forgotten(effect.device_id)
        self._correct_rows(hub, event, effects)
        self._ordered(hub, event, effects)
        if before is None:
            return
        mark, waiting, duplicates, refused = before
        member = hub.core.members.by_peer(event.peer)
        memory = self.memory
        if any(isinstance(effect, Restore) for effect in effects):
            memory.excused |= waiting
        if member is None or member.seq_last != event.push.seq or hub.core.messages_refused > refused:
            return  # what is refused decides nothing, also where it repeats what was decided
        first = member.outcome_last
        key = (member.device_id, event.push.seq)
        known = memory.decided.get(key)
        if known is not None and known != (mark, first):
            assert key not in memory.acknowledged, f"push {key} was answered {known}, and is now {(mark, first)}"
        if hub.core.duplicates == duplicates and hub.log is not None:
            memory.entries[key] = hub.log.last + 1
            memory.rows[hub.log.last + 1] = (*key, getattr(first, "reason", type(first).__name__.lower()))
            if isinstance(first, Buffered):
                memory.row_of[event.handle] = hub.log.last + 1
        memory.decided[key] = (mark, first)

    def _correct_rows(self, hub, event, effects):
        """Note what becomes of updates that waited."""
        if hub.log is None:
            return
        dropped = "revoked" if isinstance(event, Revoked) else "rolled_back"
        dropped = "quarantined" if _is_order(event) else dropped
        became = {}
        for effect in effects:
            if isinstance(effect, Fold):
                became |= dict.fromkeys(effect.handles, "applied")
            elif isinstance(effect, Discard):
                became[effect.handle] = dropped
        rows = self.memory.row_of
        entry = hub.log.last + 1
        self.memory.corrections += [(entry, rows[handle], became[handle]) for handle in became if handle in rows]

    def _ordered(self, hub, event, effects):
        """Check that an order is done once, and that no update counts of a device that is excluded."""
        memory, orders = self.memory, hub.core.policy_engine.state.divergence.orders
        before = memory.excluded
        if _is_order(event):
            device, order = event.message.device_id, event.message.order
            if any(isinstance(effect, SendStatus) for effect in effects):
                memory.orders.append((0 if hub.log is None else hub.log.last + 1, event.peer, device, order))
            memory.excused |= {memory.handles[one.handle] for one in effects if isinstance(one, Discard)}
            told = [effect for effect in effects if isinstance(effect, HubReport)]
            done = [(one.event, one.device_id) for one in told if one.event in ("excluded", "released")]
            if order == "quarantine" or device in before:
                changed = before != memory.excluded
                assert done == [(TOLD[order], device)] * changed, f"{order} {device}: {done}"
        assert orders.keys() == memory.excluded, f"{set(orders)} are excluded, not {memory.excluded}"
        for fold in effects:
            if isinstance(fold, Fold):
                names = {memory.handles[handle][0] for handle in fold.handles}
                assert not names & orders.keys(), f"updates of {names & orders.keys()} count, which are excluded"

    def _forgotten(self, device_id):
        """Forget a device's numbers, which begin again: the hub does not know the device any more."""
        for numbers in (self.memory.decided, self.memory.acknowledged):
            for key in [key for key in numbers if key[0] == device_id]:
                del numbers[key]

    def folding(self, lineage, plan, updates, *, again=False):
        marks = [self.memory.handles[handle] for handle in plan.handles]
        made = (lineage, plan.number)
        if again and made in self.memory.history:
            assert self.memory.history[made] == marks, f"version {made} was made of other updates before"
            return
        if self._world.name == "exact":
            assert all(map(self._world.marks.is_sound, updates)), f"version {plan.number} takes a spoilt update"
        for mark in marks:
            where = self.memory.where.get(mark)
            assert where is None, f"{mark} counts twice: {where} and {made}"
            self.memory.where[mark] = made
        self.memory.history[made] = marks
        if not again:
            assert made not in self._made, f"version {made} is made twice"
            self._made.add(made)

    def advancing(self, lineage, snapshot):
        self._note(self._models, lineage, snapshot)

    def publishing(self, lineage, snapshot):
        self._note(self._published, lineage, snapshot)

    def sending_apart(self, number, vector):
        """Note a model that one device is sent; another may take its place before it leaves."""
        self._off_chain.add((number, xxhash.xxh3_64_digest(vector)))

    def _note(self, versions, lineage, snapshot):
        digest = xxhash.xxh3_64_digest(snapshot.vector)
        known = versions.setdefault((lineage, snapshot.number), digest)
        assert known == digest, f"version {(lineage, snapshot.number)} is another model"

    def _recorded(self, lineage, number):
        """Return the hash of what devices are given of a version, made on this branch or before it began."""
        versions = self._published or self._models
        while (lineage, number) not in versions:
            assert lineage in self._parents, f"version {(lineage, number)} was never published"
            lineage, shared = self._parents[lineage]
            assert number <= shared, f"version {number} is not on the way to {lineage} {shared}"
        return versions[lineage, number]

    # -- messages --------------------------------------------------------------------------------------------

    def leaves(self, hub, peer, header):
        """Note a message that leaves the hub: an answer is a promise."""
        message = wire.decode(header)
        ack = message if isinstance(message, Ack) else getattr(message, "ack", None)
        name = peer.partition(b"#")[0].decode()
        if ack is not None:
            self._promised(hub, name, ack)
        if isinstance(message, Status):
            self._confirmed(hub, peer)
        if isinstance(message, Assignment):
            lineage, number = message.version.lineage, message.version.number
            assert number <= hub.core.version
            assert number >= self._assigned.get((name, lineage), 0), f"{name} is sent back to version {number}"
            self._assigned[name, lineage] = number
            self.memory.given.add((lineage, number))

    def shows(self, status):
        """Note a status that leaves the hub: it is a promise, too."""
        self.memory.shown.add((status["lineage"], status["version"]))
        self.memory.applied_shown = max(self.memory.applied_shown, status["updates_applied"])

    def _confirmed(self, hub, peer):
        """Check that an order is durable when its operator is told."""
        for entry, operator, device, order in self.memory.orders:
            if operator == peer and hub.log is not None:
                assert entry <= hub.log.durable, f"{order} {device} is confirmed, and entry {entry} is not durable"

    def _promised(self, hub, name, ack):
        memory = self.memory
        first = ack.outcome.first if isinstance(ack.outcome, Duplicate) else ack.outcome
        key = (name, ack.seq)
        assert key in memory.decided, f"push {key} is answered, and nothing was decided"
        mark, decided = memory.decided[key]
        assert decided == first, f"push {key} is answered {first}, and decided was {decided}"
        if hub.log is not None:
            entry = memory.entries[key]
            assert entry <= hub.log.durable, f"push {key} is answered, and entry {entry} is not durable"
        memory.promised[mark] = first
        memory.acknowledged[key] = (mark, first)
        self._said.add((*key, mark, first))
        # An answer without a model need not wait for the fold.
        if isinstance(first, Applied) and first.number <= hub.engine.model.current.number:
            self._assert_applied(mark, first)

    def _assert_applied(self, mark, first):
        where = self.memory.where.get(mark)
        assert where is not None, f"{mark} is in no version, and was {first}"
        assert where[1] == first.number, f"{mark} is in {where}, not in {first}"

    # -- the hub ---------------------------------------------------------------------------------------------

    def after_step(self, hub):
        """Check the hub's invariants, leases and memory."""
        if not hub.running or hub.stopped:
            return
        hub.core.check()
        engine = hub.engine
        now_s, limits = hub._now_s(), hub.core.settings.limits
        for member in hub.core.members.members.values():
            alive = not member.live or member.lease_until_s >= now_s or engine.status_answers._standing_still
            assert alive, f"{member.device_id} lives without a lease"
        assert engine._capacity._updates_held() <= limits.updates_held_max
        assert engine._capacity._snapshots_held() <= limits.snapshots_max + len(self._world.devices)
        assert len(engine._deliveries.outgoing._suspended) <= limits.snapshots_max
        assert len(engine._intake.incoming) <= limits.updates_held_max
        assert len(engine.outbox) <= MESSAGES_HELD_MAX * len(self._world.devices)

    def _waiting(self, core):
        """Return the marks of the updates that wait to be folded."""
        return {self.memory.handles[one.handle] for one in core.policy_engine.state.gathering.contributions}

    def checkpoint_begins(self):
        """Note that a checkpoint begins: no other may begin until it is written."""
        self._grown = 0

    def journal_grows(self, nbytes):
        """Note bytes written to the journal while a checkpoint was being written."""
        self._grown += nbytes
        self._grown_max = max(self._grown_max, self._grown)

    def noted(self, number, core):
        """Note the core's state after an entry of the log."""
        self.memory.states[number] = xxhash.xxh3_64_digest(dump_state(core))

    def replayed(self, number, core):
        """Check the core after an entry that was read back: it must be as it was then."""
        assert self.memory.states.get(number) == xxhash.xxh3_64_digest(dump_state(core)), (
            f"after entry {number} the core is not what it was"
        )

    def begun(self, run):
        """Note that the hub begins on an empty disk."""
        lineage = run.core.lineage
        self.noted(0, run.core)
        self.advancing(lineage, run.model.current)
        if run.publisher._published is not None:
            self.publishing(lineage, run.publisher.published)

    def recovered(self, run):
        """Check a recovered hub: no promise may be missing, and nothing may have changed."""
        core, memory = run.core, self.memory
        lineage, version, ancestry = core.lineage, core.version, core.policy_engine.state.ancestry
        self.replayed(run._last, core)
        for number in [number for number in memory.states if number > run._last]:
            del memory.states[number]

        for number in [number for number in memory.rows if number > run._last]:
            del memory.rows[number]
        memory.row_of = {handle: number for handle, number in memory.row_of.items() if number <= run._last}
        memory.corrections = [one for one in memory.corrections if one[0] <= run._last]
        memory.orders = [one for one in memory.orders if one[0] <= run._last]
        orders = core.policy_engine.state.divergence.orders
        assert orders.keys() == memory.excluded, f"the hub has {set(orders)} excluded, not {memory.excluded}"

        def lost(known):
            return known[1] > version or not ancestry.knows(ModelVersion(*known))

        for key in [key for key in memory.history if lost(key)]:
            for mark in memory.history.pop(key):
                del memory.where[mark]
        assert run.model.current.number == version
        digest = xxhash.xxh3_64_digest(run.model.current.vector)
        assert digest == self._model(lineage, version), f"version {version} is another model"
        published = run.publisher.published
        digest = xxhash.xxh3_64_digest(published.vector)
        assert digest == self._recorded(lineage, published.number), f"version {published.number} is another"
        for known in memory.given:
            assert not lost(known), f"version {known} was given to a device, and the hub has forgotten it"
            self._model(lineage, known[1])
        for known in memory.shown:
            assert not lost(known), f"a status has shown version {known}, and the hub has forgotten it"
        assert core.updates_applied >= memory.applied_shown, (
            "the hub has forgotten updates that a status has shown"
        )
        self._assert_kept(core)
        for name, seq in memory.acknowledged:
            member = core.members.members.get(name)
            if member is None:
                assert self._world.forgets, f"the hub has forgotten {name}"
            else:
                assert member.seq_last >= seq, f"the hub has forgotten that it answered push {seq} of {name}"

    def _model(self, lineage, number):
        while (lineage, number) not in self._models:
            lineage, shared = self._parents[lineage]
            assert number <= shared
        return self._models[lineage, number]

    def history_gave_way(self):
        """Note that a checkpoint was written, and that the history before it perhaps was not."""
        self.memory.rows_lost = True

    def rows_are_right(self, run):
        """Check that the history has one row for each decision in the log, but for those thinned out."""
        history, disk = run.history, self._world.disk
        kept = [*history._unwritten, *map(row_of, history._waiting)]
        found = read_rows(disk, history._file._nbytes)
        assert not found.trouble or not found.updates, found.trouble
        updates = [*found.updates, *(row for row in kept if isinstance(row, UpdateRow))]
        corrected = {row.row: row.outcome for row in kept if isinstance(row, Correction)}
        updates = [correct(row, corrected) for row in updates]
        rows = [(row.entry, row.device, row.number, row.outcome) for row in updates]
        became = {number: outcome for _, number, outcome in self.memory.corrections}
        decided = [(entry, *row) for entry, row in sorted(self.memory.rows.items())]
        expected = [(entry, name, seq, became.get(entry, outcome)) for entry, name, seq, outcome in decided]
        if self.memory.rows_lost:
            assert len(set(rows)) == len(rows)
            assert set(rows) <= {*expected, *decided}
            return
        whole = len(expected) + len(found.evaluations) <= history._file._rows_max
        newest = len(expected) if whole else history._file._rows_max // 4
        assert set(rows) <= set(expected)
        assert rows == sorted(set(rows))
        assert rows[-newest:] == expected[-newest:], "the history has not one row for each decision"

    def branched(self, lineage, number, branch):
        """Note that the hub resumes under another lineage."""
        assert branch != lineage, f"the hub resumes under {lineage}"
        assert branch not in self._parents
        self._parents[branch] = (lineage, number)

    def _assert_kept(self, core):
        """Check that every acknowledged update is in the model, or waits for its fold."""
        waiting = self._waiting(core)
        memory = self.memory
        for mark, first in memory.promised.items():
            if isinstance(first, Rejected):
                assert mark not in memory.where, f"{mark} was rejected, and counts"
                assert mark not in waiting, f"{mark} was rejected, and waits"
            elif isinstance(first, Applied):
                self._assert_applied(mark, first)
            elif mark not in memory.excused:
                assert mark in memory.where or mark in waiting, f"{mark} is lost: {first}"
        both = waiting & memory.where.keys()
        assert not both, f"{both} count, and wait to be counted again"

    # -- devices ---------------------------------------------------------------------------------------------

    def told(self, mark, seq, outcome):
        """Note the outcome of an update that a device is told."""
        first = outcome.first if isinstance(outcome, Duplicate) else outcome
        key = (mark[0], seq)
        assert (*key, mark, first) in self._said, f"{mark}, push {key}, was told {first}, and nobody said so"
        if self.memory.promised.get(mark) != first:
            return  # the disk was put back since: that was lost with it
        assert self.memory.told.get(mark, first) == first, f"{mark} is answered twice"
        self.memory.told[mark] = first

    def holds(self, device, version, vector):
        """Check a version that a device has installed: it must be to the bit what the hub sent."""
        lineage, number = version.lineage, version.number
        digest = xxhash.xxh3_64_digest(vector)
        if (number, digest) in self._off_chain:
            return
        if device.device_id in self._world.local and digest == self._model(lineage, number):
            return
        assert digest == self._recorded(lineage, number), f"{device.device_id} holds another {(lineage, number)}"

    # -- in the end ------------------------------------------------------------------------------------------

    def at_rest(self):
        """Check the model against what the devices were told, when nothing is in flight any more."""
        world, memory = self._world, self.memory
        hub = world.hub
        self._assert_kept(hub.core)
        waiting = self._waiting(hub.core)
        for mark, outcome in memory.told.items():
            if isinstance(outcome, Rejected):
                assert mark not in memory.where, f"{mark} was rejected, and counts"
            elif mark not in memory.excused:
                counts = mark in memory.where or mark in waiting
                assert counts, f"{mark} was {outcome}, and does not count"
        for device in world.training:
            member = hub.core.members.members[device.device_id]
            seq = device.engine.core.work.pending.seq_last
            assert member.seq_last == seq, f"{device.device_id} is at {seq}, for the hub at {member.seq_last}"
        assert not memory.excluded, f"{memory.excluded} are still excluded"
        self._disk_is_tidy()
        self.rows_are_right(hub._run)
        if world.name == "exact":
            self._in_the_model()

    def _disk_is_tidy(self):
        """Check that files the hub no longer needs are gone from its disk."""
        world = self._world
        disk, settings = world.disk, world.hub.core.settings.checkpoint
        names = disk.names()
        assert not [name for name in names if name.endswith(".part")]
        kinds = [[name for name in names if name.endswith(kind)] for kind in (".json", ".safetensors")]
        # The best and those kept; and one that was being written when the hub died for the last time.
        assert all(len(kind) <= settings.keep + 1 for kind in kinds), f"there are {kinds}"
        journal = sum(disk.size(name) for name in names if name.startswith("journal-"))
        # While a checkpoint is being written no other begins, however much the journal grows. The segment that is
        # being written stays, however large it may become.
        interval = settings.journal_bytes_max + 4 * world.marks.spec.nbytes + self._grown_max
        most = 3 * (interval + world.segment_bytes_max)
        assert journal <= most, f"the journal has {journal} bytes, over {most}"

    def _in_the_model(self):
        """Read the marks off the model itself."""
        told = self.memory.told
        for name, device in self._world.devices.items():
            made = device.training.trainer.updates
            counts = self._world.marks.in_model(self._world.hub.model, name)
            least, most = np.zeros(SLOTS), np.zeros(SLOTS)
            for number in range(1, made + 1):
                outcome = told.get((name, number))
                least[number % SLOTS] += isinstance(outcome, Applied)
                # Updates that died with their device before they were answered were never promised.
                most[number % SLOTS] += outcome is None or isinstance(outcome, Applied)
            wrong = np.flatnonzero((counts < least) | (counts > most) | (counts != np.round(counts)))
            assert not len(wrong), (
                f"{name}: updates {wrong.tolist()} count {counts[wrong].tolist()} times, "
                f"not {least[wrong].tolist()} to {most[wrong].tolist()}"
            )


def _is_order(event):
    return isinstance(event, HubReceived) and isinstance(event.message, Order)
