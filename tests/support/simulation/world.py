"""A small fleet in which the outcome of every single update can be checked.

Every update leaves a mark of its own in the model: device i's k-th update adds 1 to one value that belongs to it.
So the model shows which updates it holds, and how often; the checks need nothing that the hub says of itself.
"""

import struct
from random import Random
from unittest import mock

import msgspec
import numpy as np
import xxhash

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.device.effects import ResolvePush
from edgeasync.core.device.events import ModelInstalled
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.engine.sender import ANYBODY
from edgeasync.core.hub.settings import (
    FLOAT32,
    CheckpointSettings,
    CodecSettings,
    HubCoreSettings,
    Limits,
    Liveness,
)
from edgeasync.durable import recovery
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ImmediateAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor, NotFiniteDetector
from edgeasync.policies.optimizers import SGD, Nesterov
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import ConstantStaleness
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.disk import SimulatedDisk
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub, WritingPace
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload
from tests.support.simulation.checks import Checks, Memory
from tests.support.simulation.marks import LEARNT, Marks
from tests.support.simulation.whims import LossLost

UNUSED = 20_000
"""Further values, so that payloads are sent in pieces."""

THINNED_ROWS_MAX = 40
"""Rows of a history that is soon too long, in every fourth world."""

FOLD_S = 0.02
"""The time of work in the background, for fleets whose folds are done there."""

QUIET = Monitor(detectors=(), clip=0)
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
    "synchronous": (
        policy(aggregate=SynchronousAggregator(deadline_s=3.0), behind_max=1.2, preempt=True),
        FLOAT32,
    ),
    "momentum": (
        policy(aggregate=ImmediateAggregator(), optimizer=(Nesterov(learning_rate=0.3, momentum=0.7),)),
        CodecSettings(push="top_k(0.1)+int8"),
    ),
    "rollback": (
        policy(
            aggregate=BufferedAggregator(count=2, wait_s_max=2.0),
            monitor=Monitor(detectors=(NotFiniteDetector(count_max=1), LossLost()), calm_updates=3),
        ),
        FLOAT32,
    ),
}


MESSAGES_PER_STATUS = 29
"""In half of the worlds somebody asks for the status after this number of messages, again and again."""


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
            loss = np.nan
            if self.updates // self.diverges % 2:
                learnt[0] = np.nan
        return StepResult(loss + 1e-9 * self.updates, 4)  # no two updates are alike


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
    """A device that notes what it sends and is told, and which of its updates were answered."""

    def __init__(self, world, *arguments, **options):
        self.world = world
        self.quiet = self.stilled = False
        self.answers = 0
        super().__init__(*arguments, **options)
        self._train, self.training.train = self.training.train, self.train

    def _make_engine(self):
        engine = super()._make_engine()
        handle, push = engine.core.handle, engine._push

        def watched(event, now_s):
            self.world.checks.time_is(engine.core, now_s)
            if isinstance(event, ModelInstalled):
                self.world.checks.holds(self, event.assignment.version, engine._model.base)
            effects = handle(event, now_s)
            for effect in effects:
                if isinstance(effect, ResolvePush):
                    self.answers += 1
                    seq = engine.core.work.pending.seq_last
                    self.world.checks.told(self.mark, seq, effect.outcome)
            return effects

        def watched_push(message):
            self.mark = self.world.checks.pushed(self, message)
            push(message)

        engine.core.handle, engine._push = watched, watched_push
        return engine

    def train(self, *arguments, **options):
        self.stilled = self.quiet
        if not self.quiet:
            self._train(*arguments, **options)

    def send(self, header, payload):
        self.world.trace.note(self._clock.now_s, self.device_id, header, payload or b"")
        super().send(header, payload)

    def report(self, report):
        self.world.trace.note(self._clock.now_s, self.device_id, report)
        super().report(report)

    @property
    def resting(self):
        """Whether it has nothing to do and waits for no answer but a flush."""
        core = self.engine.core
        awaits_steps = core.work.state == "training" or core.work._arrived
        done = core.work.state == "idle" or (awaits_steps and self.stilled)
        return done and core.link == "joined" and core.work.pending.push is None


class WatchedDisk(SimulatedDisk):
    """A disk whose copies carry the checks' memory, for a hub that resumes from the copy."""

    def __init__(self, world, seed):
        super().__init__(seed)
        self._checks = world.checks
        self._memories = []

    def copy(self):
        copy = super().copy()
        self._memories.append((copy, self._checks.memory.copy()))
        return copy

    def replace(self):
        super().replace()
        self._checks.memory = Memory()

    def restore(self, copy):
        super().restore(copy)
        for known, memory in self._memories:
            if known is copy:
                self._checks.memory = memory.copy()


class WatchedHub(SimulatedHub):
    """A hub that notes what it sends, and is looked at after everything it does."""

    def __init__(self, world, clock, **options):
        self.world = world
        self._checks = world.checks
        self._received = 0
        super().__init__(clock, **options)

    @property
    def version(self):
        return self.core.version

    @property
    def _dead(self):
        """Whether the process is dead and does not know."""
        disk = self.world.disk
        return disk is not None and disk.powerless

    # -- resuming from the disk ------------------------------------------------------------------------------

    def start(self):
        with mock.patch.multiple(recovery, HubModel=self._model_again, Publisher=self._publisher_again):
            super().start()

    def _make_core(self, *parts):
        self._core_again = super()._make_core(*parts)
        return self._core_again

    def _model_again(self, *parts):
        model = HubModel(*parts)
        fold, advance = model.fold, model.advance

        def watched_fold(plan, updates):
            self._checks.folding(self._core_again.lineage, plan, updates, again=True)
            return fold(plan, updates)

        def watched_advance(snapshot):
            self._checks.advancing(self._core_again.lineage, snapshot)
            advance(snapshot)

        model.fold, model.advance = watched_fold, watched_advance
        return model

    def _publisher_again(self, *parts):
        publisher = Publisher(*parts)
        publish = publisher.publish

        def watched_publish(**options):
            publish(**options)
            self._checks.publishing(self._core_again.lineage, publisher.published)

        publisher.publish = watched_publish
        return publisher

    def replayed(self, number, entry, effects):
        if not self._dead:
            self._checks.replayed(number, self._core_again)
        return True

    def opened(self, run):
        if not run.checkpoint:
            self._checks.begun(run)
        if self._dead:
            raise OSError("the hub was killed while it opened its run")
        if run.checkpoint:
            self._checks.recovered(run)
            self._checks.rows_are_right(run)
        self._checks.time_is(run.core, run.now_s)
        self._watch()
        self.world.trace.note(self.clock.now_s, "hub opened", run._last, run.core.version)

    def crash(self, connections="silent"):
        super().crash(connections)
        self.world.trace.note(self.clock.now_s, "hub crashed")

    # -- it works --------------------------------------------------------------------------------------------

    @property
    def resting(self):
        """Whether no fold is running or queued, and no answer waits for the disk."""
        engine = self.engine
        return self.running and not (engine._fold_queue._busy or engine._fold_queue._waiting or engine.outbox)

    def _watch(self):
        """Watch the engine's decisions and new versions; after a crash there is a new engine."""
        checks, core, model = self._checks, self.engine.core, self.engine.model
        publisher, log = self.engine._deliveries.publisher, self.log
        if self.world.background:
            self.engine._fold_queue._inline = False
        for watched, names in ((model, ("fold", "advance")), (publisher, ("publish",))):
            for name in names:
                vars(watched).pop(name, None)
        handle, fold, advance, publish = core.handle, model.fold, model.advance, publisher.publish

        def watched_handle(event, now_s):
            checks.time_is(core, now_s)
            before, lineage = checks.before_event(self, event), core.lineage
            effects = handle(event, now_s)
            if core.lineage != lineage and not self._dead:
                checks.branched(lineage, core.version, core.lineage)
            checks.after_event(self, event, before, effects)
            return effects

        def watched_fold(plan, updates):
            checks.folding(core.lineage, plan, updates)
            return fold(plan, updates)

        def watched_advance(snapshot):
            checks.advancing(core.lineage, snapshot)
            advance(snapshot)

        def watched_publish(**options):
            publish(**options)
            checks.publishing(core.lineage, publisher.published)

        core.handle, model.fold, model.advance = watched_handle, watched_fold, watched_advance
        publisher.publish = watched_publish
        self._watch_off_chain(publisher._off_chain)
        if log is not None:
            self._watch_log(log, core)

    def _watch_off_chain(self, off_chain):
        """Note what single devices are sent beside the chain."""
        vars(off_chain).pop("put", None)
        put = off_chain.put

        def watched_put(owner, number, sent, before):
            self._checks.sending_apart(number, sent.vector)
            put(owner, number, sent, before)

        off_chain.put = watched_put

    def _watch_log(self, log, core):
        """Note the core after every entry."""
        append = log.append

        def watched_append(entry, payload, checksum=None):
            before = log.bytes_appended
            append(entry, payload, checksum)
            self._checks.noted(log.last, core)
            if self.engine._log_writer.saving:
                self._checks.journal_grows(log.bytes_appended - before)

        log.append = watched_append

    def send(self, peer, header, payload):
        if self._dead:
            return
        self.world.trace.note(self.clock.now_s, peer, header, payload or b"")
        self._checks.leaves(self, peer, header)
        super().send(peer, header, payload)

    def receive(self, peer, header, payload):
        super().receive(peer, header, payload)
        self._checks.after_step(self)
        self._received += 1
        if self.world.is_asked and self.running and not self.stopped and not self._received % MESSAGES_PER_STATUS:
            self.engine.status_answers.ask(self._show, ANYBODY, self._now_s())

    def _show(self, text):
        if not self._dead:
            self._checks.shows(msgspec.json.decode(text))

    def _tick(self, due_s):
        super()._tick(due_s)
        self._checks.after_step(self)

    def save(self, state):
        self._checks.checkpoint_begins()
        super().save(state)

    def run_in_background(self, work, then):
        self.after(FOLD_S, lambda: super(WatchedHub, self).run_in_background(work, then))

    def report(self, report):
        self.world.trace.note(self.clock.now_s, report)
        super().report(report)

    def _write(self, state):
        covered = super()._write(state)
        if self._run.history.trouble:
            self._checks.history_gave_way()
        return covered


class World:
    """A hub, its disk and two to six devices, drawn by seed."""

    def __init__(self, seed, *, journal=True, delayed=False):
        random = Random(f"{seed}/world")
        self.name = "exact" if delayed or random.random() < 0.5 else random.choice(list(POLICIES))
        policy, codec = POLICIES[self.name]
        if delayed:
            policy = msgspec.structs.replace(policy, delay_steps=1 + seed % (FIXED.local_steps - 1))
        self.clock = VirtualClock()
        self.trace = Trace()
        names = [f"device-{number}" for number in range(1, random.randint(2, 6) + 1)]
        self.background = random.random() < 0.3
        large = random.random() < 0.1
        self.marks = Marks(names, UNUSED if large else 0)
        self.forgets = len(names) > 2 and random.random() < 0.2
        """Whether the hub has one place too few, so that it forgets devices that were away."""
        self.is_asked = seed % 2 == 0
        self.checks = Checks(self)
        self.disk = WatchedDisk(self, seed) if journal else None
        self.journal_bytes_max = random.choice([400_000] if large else [5_000, 30_000, 200_000])
        self.segment_bytes_max = random.choice([2_000, 20_000, 1 << 26])
        self.target = np.array([random.uniform(-1.0, 1.0) for _ in range(LEARNT)], np.float32)
        self.hub = WatchedHub(
            self,
            self.clock,
            spec=self.marks.spec,
            initial=np.zeros(self.marks.spec.length, np.float32),
            policy=policy,
            settings=HubCoreSettings(
                codec=codec,
                liveness=Liveness(heartbeat_s=0.5, lease_s=2.0, progress_s=5.0),
                limits=Limits(
                    quarantine_s=1.0,
                    updates_held_max=8,
                    snapshots_max=4,
                    retry_after_s=0.2,
                    devices_max=len(names) - self.forgets,
                ),
                checkpoint=CheckpointSettings(
                    every=random.choice(["1 second", "4 updates", "20 updates", "1 minute"]),
                    keep=random.choice([2, 3]),
                    journal_bytes_max=self.journal_bytes_max,
                ),
            ),
            seed=seed,
            disk=self.disk,
            writing=WritingPace(
                segment_bytes_max=self.segment_bytes_max,
                history_rows_max=THINNED_ROWS_MAX if seed % 4 == 0 else 10_000,
                sync_s=random.choice([0.002, 0.02, 0.1]),
                save_s=random.choice([0.002, 0.05, 0.5]),
            ),
        )
        self.hub.start()
        self.devices = {}
        self.local = {name for number, name in enumerate(names) if (seed + number) % 5 == 0}
        """The devices on the hub's own machine: they get versions that were not published."""
        for number, name in enumerate(names):
            rate = random.choice([np.inf, 1e6, 1e5])
            self.devices[name] = WatchedDevice(
                self,
                self.hub,
                name,
                Counting(self.marks, name, self.target, 11 if self.name == "rollback" else 0),
                step_s=random.uniform(0.03, 0.25),
                link=LinkProfile(rate, rate, random.uniform(0.001, 0.05)),
                workload=SimulatedWorkload(examples=random.choice([0, 10, 100]), same_host=name in self.local),
                seed=seed,
                keeps=random.random() < 0.5,
                limits=DeviceLimits(
                    delay_steps=(seed + number) % FIXED.local_steps if delayed and number % 2 else None
                ),
            )

    @property
    def is_plain(self):
        """Whether the plan of faults is the only difficulty."""
        small = self.marks.spec.nbytes < UNUSED
        return small and self.hub.writing.sync_s < 0.01 and not self.background

    @property
    def training(self):
        """The devices that must train once all is healed: those that the hub has a place for."""
        return list(self.devices.values())[: len(self.devices) - self.forgets]

    def distance(self):
        """How far the model is from what the devices teach it; 1 at first."""
        missing = self.hub.model[:LEARNT] - self.target
        return float(np.linalg.norm(missing) / np.linalg.norm(self.target))
