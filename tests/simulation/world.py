"""A small fleet that can be told to the update what became of its work, watched by everything that can be checked.

Every update leaves a mark of its own in the model: device i's k-th adds 1 to one value that belongs to it. So who
looks at the model sees which updates it holds, and how often; nothing that the hub says of itself is needed.
"""

import struct
from random import Random

import numpy as np
import xxhash

from edgeasync.core.device_effects import Settle
from edgeasync.core.settings import FLOAT32, CodecSettings, HubCoreSettings, Limits, Liveness
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ImmediateAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor, NotFiniteWatch
from edgeasync.policies.optimizers import SGD, Nesterov
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import ConstantStaleness
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Ack, Applied, Assignment, Duplicate, Rejected
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.disk import SimulatedDisk
from edgeasync.simulation.fleet import SimulatedDevice
from edgeasync.simulation.hub import SimulatedHub
from edgeasync.simulation.link import LinkProfile
from edgeasync.training.trainer import StepResult

HUB_CRASHES = hasattr(SimulatedHub, "crash")
"""Whether there is a hub that can be killed and goes on from its disk."""

LEARNT = 8
"""Values of the model that are really trained; the others count updates."""

UNUSED = 20_000
"""Values that are neither, where payloads are to travel in pieces."""

FOLD_S = 0.02
"""What work in the background takes, where folds are done there."""

SLOTS = 128
"""Updates of one device that are told apart."""

QUIET = Monitor(watch=())
FIXED = FixedFrequency(local_steps=4)


def policy(**parts):
    return Policy(**{"staleness": ConstantStaleness(), "optimizer": (SGD(),), "frequency": FIXED} | parts)


EXACT = policy(aggregate=ImmediateAggregator(), monitor=QUIET)
"""Every update is added as it is, so the model is the sum of what was counted, to the bit."""

POLICIES = {
    "exact": (EXACT, FLOAT32),
    "default": (Policy(), CodecSettings()),
    "immediate": (policy(aggregate=ImmediateAggregator()), CodecSettings()),
    "buffered": (policy(aggregate=BufferedAggregator(count=3, wait_s_max=2.0)), CodecSettings(push="int8")),
    "buffered, no time": (policy(aggregate=BufferedAggregator(count=2)), FLOAT32),
    "quorum": (policy(aggregate=QuorumAggregator(), overlap_steps_max=3), CodecSettings(push="float16")),
    "synchronous": (policy(aggregate=SynchronousAggregator(deadline_s=3.0)), FLOAT32),
    "momentum": (
        policy(aggregate=ImmediateAggregator(), optimizer=(Nesterov(learning_rate=0.3, momentum=0.7),)),
        CodecSettings(push="top_k(0.1)+int8"),
    ),
    "rollback": (
        policy(
            aggregate=BufferedAggregator(count=2, wait_s_max=2.0),
            monitor=Monitor(watch=(NotFiniteWatch(count_max=1, remedy="rollback"),), calm_updates=3),
        ),
        FLOAT32,
    ),
}

Mark = tuple[str, int]
"""An update: the device, and the how-manieth of its own it is."""


class Marks:
    """Where the marks of all devices are, and how to read them."""

    def __init__(self, names, unused):
        self.names = names
        self.spec = ParameterSpec((Parameter("w", (LEARNT + SLOTS * len(names) + unused,)),))
        self._scratch = np.empty(self.spec.length, np.float32)

    def place(self, name, number):
        return LEARNT + SLOTS * self.names.index(name) + number % SLOTS

    def of_update(self, source):
        """Return whose update this is, and which of its slots it marks."""
        values = source.read(0, self.spec.length, self._scratch)
        place = int(np.argmax(values[LEARNT : LEARNT + SLOTS * len(self.names)]))
        return self.names[place // SLOTS], place % SLOTS

    def is_sound(self, source):
        """Whether an update that travels as it is marks one slot and no other."""
        values = source.read(LEARNT, LEARNT + SLOTS * len(self.names), self._scratch)
        return np.count_nonzero(values) == 1 and values.max() == 1.0

    def in_model(self, vector, name):
        return vector[self.place(name, 0) : self.place(name, 0) + SLOTS]


class Counting:
    """A trainer that marks each of its updates, and learns something besides."""

    def __init__(self, marks, name, target, diverges):
        self.spec = marks.spec
        self.updates = 0
        self.diverges = diverges
        self._marks, self._name, self._target = marks, name, target

    def begin(self, parameters):
        self._parameters = parameters
        self._marked = False

    def step(self):
        parameters, learnt = self._parameters, self._parameters[:LEARNT]
        if not self._marked:
            self._marked = True
            self.updates += 1
            parameters[self._marks.place(self._name, self.updates)] += 1.0
        distance = self._target - learnt
        loss = float(np.dot(distance, distance))
        learnt += np.float32(0.03) * distance
        if self.diverges and self.updates % self.diverges == 0:
            learnt[0] = np.nan
            loss = np.nan
        return StepResult(loss, 4)


class Trace:
    """A hash over everything that was sent and told, and when."""

    def __init__(self):
        self._hash = xxhash.xxh3_128()
        self.entries = 0

    def note(self, time_s, *parts):
        self.entries += 1
        self._hash.update(struct.pack("<d", time_s))
        for part in parts:
            self._hash.update(part if isinstance(part, bytes | memoryview) else repr(part).encode())

    def digest(self):
        return self._hash.hexdigest()


class WatchedDevice(SimulatedDevice):
    """A device that notes what it sends, is told, and has learnt of its own updates."""

    def __init__(self, world, *arguments, **options):
        self.world = world
        self.quiet = False
        self.answers = 0
        super().__init__(*arguments, **options)

    def _make_exchange(self):
        exchange = super()._make_exchange()
        handle = exchange.core.handle

        def watched(event, now_s):
            effects = handle(event, now_s)
            for effect in effects:
                if isinstance(effect, Settle):
                    self.answers += 1
                    self.world.checks.told(self, effect.outcome)
            return effects

        exchange.core.handle = watched
        return exchange

    def train(self, model, local_steps, then, *, ahead):
        if not self.quiet:
            super().train(model, local_steps, then, ahead=ahead)

    def send(self, header, payload):
        self.world.trace.note(self._clock.now_s, self.device_id, header, payload or b"")
        super().send(header, payload)

    def tell(self, tell):
        self.world.trace.note(self._clock.now_s, self.device_id, tell)
        super().tell(tell)

    @property
    def resting(self):
        """Whether it has nothing to do and waits for no answer but a flush."""
        core = self.exchange.core
        return core.link == "joined" and core._push is None and core.work in ("training", "idle")


class WatchedHub(SimulatedHub):
    """A hub that notes what it sends, and is looked at after everything it does."""

    def __init__(self, world, clock, **options):
        self.world = world
        self._checks = world.checks
        self.sync_s = 0.002
        super().__init__(clock, **options)
        self._watch()

    if not HUB_CRASHES:
        running = True

    @property
    def version(self):
        return self.core.version

    def start(self):
        super().start()
        self._watch()
        self._checks.recovered(self)

    def crash(self):
        super().crash()
        self.world.trace.note(self._clock.now_s, "hub crashed")

    @property
    def resting(self):
        """Whether no fold is under way or in line."""
        return self.running and not self.exchange._folding and not self.exchange._ordered

    def _watch(self):
        """Look on when a push is decided and a version is made; the exchange is another after a crash."""
        core, model = self.exchange.core, self.exchange.model
        if self.world.background:
            self.exchange._inline = False
        handle, fold, advance = core.handle, model.fold, model.advance

        def watched_handle(event, now_s):
            before = self._checks.before_event(self, event)
            effects = handle(event, now_s)
            self._checks.after_event(self, event, before, effects)
            return effects

        def watched_fold(plan, updates):
            self._checks.folding(self, plan, updates)
            return fold(plan, updates)

        def watched_advance(snapshot):
            self._checks.advancing(self, snapshot)
            advance(snapshot)

        core.handle, model.fold, model.advance = watched_handle, watched_fold, watched_advance

    def send(self, peer, header, payload):
        disk = self.world.disk
        if disk is not None and disk.powerless:
            return  # the machine is off already
        self.world.trace.note(self._clock.now_s, peer, header, payload or b"")
        self._checks.leaves(self, peer, header)
        super().send(peer, header, payload)

    def receive(self, peer, header, payload):
        super().receive(peer, header, payload)
        self._checks.after_step(self)

    def _tick(self, due_s):
        super()._tick(due_s)
        self._checks.after_step(self)

    def run_in_background(self, work, then):
        exchange = self.exchange

        def begin():
            if self.exchange is exchange:
                super(WatchedHub, self).run_in_background(work, then)

        self._clock.after(FOLD_S, begin)

    def report(self, report):
        self.world.trace.note(self._clock.now_s, report)
        super().report(report)


class World:
    """A hub, its disk and two to six devices, drawn by seed."""

    def __init__(self, seed, *, journal=HUB_CRASHES):
        random = Random(f"{seed}/world")
        self.name = "exact" if random.random() < 0.5 else random.choice(list(POLICIES))
        judgement, codec = POLICIES[self.name]
        self.clock = VirtualClock()
        self.trace = Trace()
        names = [f"device-{number}" for number in range(1, random.randint(2, 6) + 1)]
        self.background = random.random() < 0.3
        self.marks = Marks(names, UNUSED if random.random() < 0.1 else 0)
        self.checks = Checks(self)
        self.disk = SimulatedDisk(seed) if journal else None
        self.target = np.array([random.uniform(-1.0, 1.0) for _ in range(LEARNT)], np.float32)
        self.hub = WatchedHub(
            self,
            self.clock,
            spec=self.marks.spec,
            initial=np.zeros(self.marks.spec.length, np.float32),
            judgement=judgement,
            settings=HubCoreSettings(
                codec=codec,
                liveness=Liveness(heartbeat_s=0.5, lease_s=2.0, progress_s=5.0),
                limits=Limits(
                    quarantine_s=1.0, updates_held_max=8, snapshots_max=4, retry_after_s=0.2, devices_max=8
                ),
                save_every_s=random.choice([1.0, 3.0, 60.0]),
            ),
            seed=seed,
            **({"disk": self.disk} if journal else {}),
        )
        self.devices = {}
        for name in names:
            rate = random.choice([np.inf, 1e6, 1e5])
            self.devices[name] = WatchedDevice(
                self,
                self.clock,
                self.hub,
                name,
                Counting(self.marks, name, self.target, 11 if self.name == "rollback" else 0),
                step_s=random.uniform(0.03, 0.25),
                link=LinkProfile(rate, rate, random.uniform(0.001, 0.05)),
                examples=random.choice([0, 10, 100]),
                seed=seed,
            )

    def distance(self):
        """How far the model is from what the devices teach it; 1 at first."""
        missing = self.hub.model[:LEARNT] - self.target
        return float(np.linalg.norm(missing) / np.linalg.norm(self.target))


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
        if any(type(effect).__name__ == "Restore" for effect in effects):
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
