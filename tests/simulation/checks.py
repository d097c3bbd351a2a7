"""What must hold of a hub and its devices, whatever happens."""

import numpy as np
import xxhash

from edgeasync.core.effects import Restore
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Ack, Applied, Assignment, Duplicate, Rejected
from tests.simulation.marks import SLOTS


class Checks:
    """What must hold, whatever happens. Raises `AssertionError`."""

    def __init__(self, world):
        self._world = world
        self._decided = {}
        """What the hub decided of a push, by device and number, whether it was told or not: mark and outcome."""
        self.acknowledged = {}
        """The same, where the answer has left the hub: now it is a promise."""
        self._told = {}
        """By mark: what its own device was told."""
        self._history = {}
        """By lineage and version: the marks that were folded into it."""
        self._where = {}
        """By mark: the lineage and version that it was folded into."""
        self._models = {}
        """By lineage and version: the hash of the model."""
        self._excused = set()
        """Marks that a rollback has dropped while they waited."""
        self._assigned = {}

    # -- the hub ---------------------------------------------------------------------------------------------

    def mark_of(self, source):
        name, slot = self._world.marks.of_update(source)
        return name, self.number_of(name, slot)

    def number_of(self, name, slot):
        """Return which update marks a slot: the last one that could."""
        last = self._world.devices[name]._trainer.updates
        return last - (last - slot) % SLOTS

    def before_event(self, hub, event):
        push = getattr(event, "push", None)
        if push is None or not hasattr(event, "handle"):
            return None
        return self.mark_of(hub.exchange.model._updates[event.handle]), self._waiting(hub)

    def after_event(self, hub, event, before, effects):
        if before is None:
            return
        mark, waiting = before
        member = hub.core.members.by_peer(event.peer)
        if any(isinstance(effect, Restore) for effect in effects):
            self._excused |= waiting
        if member is None or member.seq_last != event.push.seq:
            return
        first = member.outcome_last
        key = (member.device_id, event.push.seq)
        known = self._decided.get(key)
        if known is not None and known != (mark, first):
            assert key not in self.acknowledged, f"push {key} was answered {known}, and is now {(mark, first)}"
        self._decided[key] = (mark, first)

    def folding(self, hub, plan, updates):
        lineage = hub.core.lineage
        marks = [self.mark_of(update) for update in updates]
        if self._world.name == "exact":
            assert all(map(self._world.marks.is_sound, updates)), f"version {plan.number} takes a spoilt update"
        for mark in marks:
            assert mark not in self._where, f"{mark} counts twice: {self._where[mark]} and {plan.number}"
            self._where[mark] = (lineage, plan.number)
        assert (lineage, plan.number) not in self._history, f"version {plan.number} is made twice"
        self._history[lineage, plan.number] = marks

    def advancing(self, hub, snapshot):
        self._models[hub.core.lineage, snapshot.number] = xxhash.xxh3_64_digest(snapshot.vector)

    def leaves(self, hub, peer, header):
        """Take note of a message that leaves the hub: an answer is a promise."""
        message = wire.decode(header)
        ack = message if isinstance(message, Ack) else getattr(message, "ack", None)
        name = peer.partition(b"#")[0].decode()
        if ack is not None:
            self._promised(hub, name, ack)
        if isinstance(message, Assignment):
            lineage, number = message.version.lineage, message.version.number
            assert number <= hub.core.version
            assert number >= self._assigned.get((name, lineage), 0), f"{name} is sent back to version {number}"
            self._assigned[name, lineage] = number

    def _promised(self, hub, name, ack):
        first = ack.outcome.first if isinstance(ack.outcome, Duplicate) else ack.outcome
        key = (name, ack.seq)
        assert key in self._decided, f"push {key} is answered, and nothing was decided"
        mark, decided = self._decided[key]
        assert decided == first, f"push {key} is answered {first}, and decided was {decided}"
        self.acknowledged[key] = (mark, first)
        # An answer without a model need not wait for the fold.
        if isinstance(first, Applied) and first.number <= hub.exchange.model.current.number:
            self._assert_applied(hub, mark, first)

    def _assert_applied(self, hub, mark, first):
        assert self._where.get(mark) == (hub.core.lineage, first.number), f"{mark} is not in {first}"

    def after_step(self, hub):
        """Check the hub's invariants, leases and memory."""
        if not hub.running or hub.stopped:
            return
        hub.core.check()
        now_s, limits = hub._clock.now_s, hub.core.settings.limits
        for member in hub.core.members.members.values():
            assert not member.live or member.lease_until_s >= now_s, f"{member.device_id} lives without a lease"
        exchange = hub.exchange
        assert exchange._held() <= limits.updates_held_max
        assert exchange._sending() <= limits.snapshots_max + len(self._world.devices)
        assert len(exchange._outgoing._suspended) <= limits.snapshots_max
        assert len(exchange._incoming) <= limits.updates_held_max

    def _waiting(self, hub):
        """Return the marks of the updates that wait to be folded."""
        updates = hub.exchange.model._updates
        return {self.mark_of(updates[one.handle]) for one in hub.core.judge._contributions}

    def recovered(self, hub):
        """The hub is back: nothing that it promised may be missing, and nothing may have changed."""
        lineage, version = hub.core.lineage, hub.core.version
        assert all(before == lineage for before, _ in self._history), "the hub has begun a new lineage"
        for key in [key for key in self._history if key[1] > version]:
            for mark in self._history.pop(key):
                del self._where[mark]
        model = self._models.get((lineage, version))
        assert model is None or model == xxhash.xxh3_64_digest(hub.model), f"version {version} is another model"
        self._assert_kept(hub)
        for name, seq in self.acknowledged:
            member = hub.core.members.members.get(name)
            assert member is not None, f"the hub has forgotten {name}"
            assert member.seq_last >= seq, f"the hub has forgotten that it answered push {seq} of {name}"

    def _assert_kept(self, hub):
        """What was acknowledged is in the model, or waits to be."""
        waiting = self._waiting(hub)
        for (name, seq), (mark, first) in self.acknowledged.items():
            if isinstance(first, Rejected):
                assert mark not in self._where, f"{mark}, push {seq} of {name}, was rejected, and counts"
            elif isinstance(first, Applied):
                self._assert_applied(hub, mark, first)
            elif mark not in self._excused:
                assert mark in self._where or mark in waiting, f"{mark}, push {seq} of {name}, is lost: {first}"

    # -- devices ---------------------------------------------------------------------------------------------

    def told(self, device, outcome):
        """Take note of what a device is told of the update it made last."""
        mark = (device.device_id, device._trainer.updates)
        first = outcome.first if isinstance(outcome, Duplicate) else outcome
        key = (device.device_id, device.exchange.core._seq_last)
        promised = self.acknowledged.get(key)
        assert promised == (mark, first), f"{mark}, push {key}, was told {first}, and the hub said {promised}"
        assert mark not in self._told, f"{mark} is answered twice"
        self._told[mark] = first

    # -- in the end ------------------------------------------------------------------------------------------

    def at_rest(self):
        """Check the model against what the devices were told; nothing is under way any more."""
        hub = self._world.hub
        self._assert_kept(hub)
        counted = set(self._where)
        waiting = self._waiting(hub)
        for mark, outcome in self._told.items():
            if isinstance(outcome, Rejected):
                assert mark not in counted, f"{mark} was rejected, and counts"
            elif mark not in self._excused:
                assert mark in counted or mark in waiting, f"{mark} was {outcome}, and does not count"
        if self._world.name == "exact":
            self._in_the_model()

    def _in_the_model(self):
        """Read the marks off the model itself."""
        for name, device in self._world.devices.items():
            made = device._trainer.updates
            counts = self._world.marks.in_model(self._world.hub.model, name)
            least, most = np.zeros(SLOTS), np.zeros(SLOTS)
            for number in range(1, made + 1):
                outcome = self._told.get((name, number))
                least[number % SLOTS] += isinstance(outcome, Applied)
                # Of what died with the device before it was answered nobody promised anything.
                most[number % SLOTS] += outcome is None or isinstance(outcome, Applied)
            wrong = np.flatnonzero((counts < least) | (counts > most) | (counts != np.round(counts)))
            assert not len(wrong), (
                f"{name}: updates {wrong.tolist()} count {counts[wrong].tolist()} times, "
                f"not {least[wrong].tolist()} to {most[wrong].tolist()}"
            )
