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
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.disk import SimulatedDisk
from edgeasync.simulation.fleet import SimulatedDevice
from edgeasync.simulation.hub import SimulatedHub
from edgeasync.simulation.link import LinkProfile
from edgeasync.training.trainer import StepResult
from tests.simulation.checks import Checks
from tests.simulation.marks import LEARNT, Marks

HUB_CRASHES = hasattr(SimulatedHub, "crash")
"""Whether there is a hub that can be killed and goes on from its disk."""

UNUSED = 20_000
"""Values that are neither, where payloads are to travel in pieces."""

FOLD_S = 0.02
"""What work in the background takes, where folds are done there."""

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
