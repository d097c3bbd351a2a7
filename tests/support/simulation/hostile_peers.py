"""Simulated peers with one hostile member. Their models are real arrays, which the product's own code averages."""

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np

from edgeasync.core.arrays.peer_round import NotFiniteError, PeerRound
from edgeasync.core.peer import effects as e
from edgeasync.core.peer import events as v
from edgeasync.core.peer.backoff import DOUBLINGS_MAX, FREE
from edgeasync.core.peer.norms import TIMES_MAX
from edgeasync.protocol import wire
from edgeasync.protocol.peer_messages import Abandon
from edgeasync.training.last_finite import LastFinite
from tests.support.simulation.harness import noting_failure
from tests.support.simulation.peer_faults import FAULTS_S, Injector, draw_faults
from tests.support.simulation.peer_harness import PeerPlan
from tests.support.simulation.peer_world import SETTINGS, STEP_S, Checks, Device, World

HOSTILITIES = (
    "huge", "huge", "huge statistics", "growing", "tiny", "not a number", "constant", "fast rounds", "fast rounds",
    "fast rounds, said openly", "propose and abandon", "propose and abandon",
)  # fmt: skip

CALM_S = 20.0
"""Virtual time without faults. The hostile member stays hostile."""

LEFT_OUT_S = SETTINGS.lease_s * 2**DOUBLINGS_MAX
"""For how long proposals may be declined."""

STEPS_SHARE = 0.8
"""The least share of the steps that a device takes alone."""

STANDSTILL_S = 0.005
"""For how long a snapshot or a mean holds the next step up."""

COPY_S = 1.0
DIVERGES = 0.01
"""The chance that a local step leaves a model that is not finite."""

ROUND_STEPS = 8
ROUNDS_SEEN = 12
"""Over how many rounds the steps are counted."""

TIMES = msgspec.structs.replace(
    SETTINGS,
    codec="identity",
    codecs=("identity",),
    round_every_s=1.0,
    window_bytes=240,
    payload_bytes_max=1 << 20,
)
STEPS = msgspec.structs.replace(TIMES, round_steps=ROUND_STEPS)


class Trainee(Device):
    """An honest device. Each local step pulls its model towards what it is taught, unless the step diverges."""

    def __init__(self, world, name, values):
        super().__init__(world, name, values)
        self.noise = np.random.default_rng([world.seed, world.names.index(name)])
        self.taught = world.taught + self.noise.normal(size=values, scale=0.1).astype(np.float32)
        self.model = world.initial.copy()
        self.disk = self.model
        self.last_finite = LastFinite()
        self.copied_s = -math.inf
        self.standstill_s = 0.0
        self.steps_alone = 0
        self.half_due_steps = math.inf
        self.done = []  # of this start: when rounds were whole, and the steps by then
        self.rounds_done = 0
        world.clock.after(world.random.random() * STEP_S, self._step_alone)

    def start(self, *, restored=False):
        if not self.running:
            self.model = self.disk.copy()
            self.last_finite, self.copied_s = LastFinite(), self.world.clock.now_s
            self.last_finite.keep(self.model, self.steps)
            self.half_due_steps, self.done = math.inf, []
        super().start(restored=restored)

    @property
    def trains_now(self):
        return self.running and self.world.clock.now_s >= max(self.hung_until_s, self.suspended_until_s)

    def _step_alone(self):
        self.world.clock.after(STEP_S, self._step_alone)
        self.steps_alone += self.trains_now

    def _step(self):
        clock = self.world.clock
        clock.after(STEP_S + self.standstill_s, self._step)
        self.standstill_s = 0.0
        if not self.trains_now or not hasattr(self, "last_finite"):
            return
        self.last_finite.restore(self.model)
        if self.noise.random() < DIVERGES:
            self.model += np.float32(np.nan)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                away = self.taught - self.model
                self.model += np.float32(0.1) * away + np.float32(0.0) * away * away  # too long a model diverges
        self.last_finite.note_step()
        self.steps += bool(np.isfinite(self.model).all())
        if clock.now_s >= self.copied_s + COPY_S and self.last_finite.keep(self.model, self.steps):
            self.copied_s = clock.now_s
            self.disk = self.last_finite.copy[0]
        self._count_step()

    def _count_step(self):
        if self.world.settings.round_steps is None:
            return
        if self.steps >= self.half_due_steps:
            self.half_due_steps = math.inf
            self.handle(v.RoundHalfDue())
        if self.steps % ROUND_STEPS == 0:
            self.handle(v.RoundDue())

    def _carry_out(self, effect):
        super()._carry_out(effect)
        if isinstance(effect, e.PeerReport) and effect.event == "round_done":
            self.rounds_done += 1
            self.done.append((self.world.clock.now_s, self.steps))
            self.world.checks.paced(self)

    # -- arithmetic ----------------------------------------------------------------------------------------

    def _snapshot(self, effect):
        self.standstill_s += STANDSTILL_S
        self.half_due_steps = self.steps + ROUND_STEPS // 2
        proposal = effect.proposal
        arrays = self.arrays
        arrays.snapshot = self.model
        try:
            arrays.sum = PeerRound(
                self.model,
                effect.segments,
                len(proposal.members),
                proposal.codec,
                ring=proposal.topology == "ring",
                trained_length=self.world.trained_length,
            )
        except NotFiniteError as error:
            return v.WorkFailed(effect.round, str(error))
        self.world.checks.snapshot(self, arrays)
        return v.SnapshotTaken(effect.round, arrays.sum.norms)

    def _encode(self, effect):
        try:
            payload = bytes(self.arrays.sum.encode(effect.segment, effect.source, self.noise))
        except NotFiniteError as error:
            return v.WorkFailed(effect.round, str(error))
        payload = self._spoilt(payload, effect.segment)
        self.arrays.outgoing[effect.step] = payload
        return v.Encoded(effect.round, effect.step, len(payload), wire.checksum(payload))

    def _spoilt(self, payload, segment):
        return payload

    def _decode(self, effect):
        arrays = self.arrays
        payload = arrays.outgoing[effect.step] if effect.own else arrays.incoming[effect.step]
        sound = effect.own or wire.checksum(payload) == arrays.checksums[effect.step]
        norms = arrays.sum.decode(payload, effect.segment, effect.way) if sound else None
        if norms is None:
            return v.Decoded(effect.round, effect.step, sound=False)
        return v.Decoded(effect.round, effect.step, norms=norms)

    def _apply(self, effect):
        self.standstill_s += STANDSTILL_S
        try:
            self.arrays.sum.apply(self.model)
        except NotFiniteError as error:
            return v.WorkFailed(effect.round, str(error))
        self.world.checks.mean(self, self.arrays, self.arrays.sum._sum)
        self.last_finite.note_mean()
        self.rounds[effect.round] = self.world.clock.now_s
        return v.MeanApplied(effect.round)


class Patient:
    """What the hostile member's core is told of its own failed rounds: nothing."""

    def note_failed(self, proposer, now_s):
        pass

    def note_whole(self, members):
        pass

    def until_s(self, proposer):
        return 0.0


class Hostile(Trainee):
    """The hostile member: a true core that lies about one thing."""

    def __init__(self, world, name, values):
        super().__init__(world, name, values)
        self.proposed_s = 0.0
        self.withheld = set()

    def start(self, *, restored=False):
        was_running = self.running
        super().start(restored=restored)
        kind = self.world.hostility
        if was_running or not kind.startswith(("fast", "propose")):
            return
        core = self.core
        core.rounds.backoff = Patient()
        core.rounds.schedule.is_early = lambda completed, now_s: False
        core.settings = msgspec.structs.replace(core.settings, round_every_s=0.001)
        core.rounds.schedule._settings = core.settings
        core._proposes_at_s = lambda now_s: self._proposes_at_s(core)
        propose = core._propose
        core._propose = lambda now_s: self._propose(propose, now_s)
        if core.settings.round_steps is not None:
            core.settings = msgspec.structs.replace(core.settings, round_steps=1)
        if kind != "fast rounds, said openly":
            ping = core._ping
            settings = self.world.settings
            core._ping = lambda now_s, *, leaving=False: msgspec.structs.replace(
                ping(now_s, leaving=leaving),
                round_every_s=settings.round_every_s,
                round_steps=settings.round_steps,
            )

    def _proposes_at_s(self, core):
        """Propose again soon, and wait for nobody with a lower name."""
        return math.inf if core.rounds.current is not None or core.rounds.owed else self.proposed_s + 0.02

    def _propose(self, propose, now_s):
        self.proposed_s = now_s
        return propose(now_s)

    def _carry_out(self, effect):
        if isinstance(effect, e.ForwardPayload):
            spoilt = self._spoilt(bytes(self.arrays.incoming[effect.received_step]), None)
            self.arrays.outgoing[effect.step] = spoilt
            return
        if isinstance(effect, e.SendPiece) and effect.round in self.withheld:
            return  # the others send all they have meanwhile
        super()._carry_out(effect)
        event = effect.event if isinstance(effect, e.PeerReport) else ""
        if event == "round_done" and self.world.hostility == "fast rounds":
            self.world.clock.after(0.02, self._give_up_completed)
        if event == "round_started" and self.world.hostility == "propose and abandon":
            round_id = self.core.rounds.current.id
            if round_id.proposer == self.name and self.noise.random() < 0.8:
                self.withheld.add(round_id)
            self.world.clock.after(self.noise.uniform(0.0, 0.3), lambda: self._abandon(round_id))

    def _give_up_completed(self):
        """Let the others take the next round for one that is repeated."""
        for name in self.world.names:
            if name != self.name and self.running and self.core.rounds.completed is not None:
                self.world.send(self, name, Abandon(self.core.rounds.completed, "failed", ready=True))

    def _abandon(self, round_id):
        core = self.core
        if (
            core is None
            or core.rounds.current is None
            or core.rounds.current.id != round_id
            or round_id.proposer != self.name
        ):
            return
        if core.rounds.current.state in {"snapshot", "exchanging"}:
            self._do(lambda now_s: core._count(core.rounds.give_up("failed", now_s)))

    def _spoilt(self, payload, segment):
        values = np.frombuffer(payload, np.float32).copy()
        if payload == b"\0":
            return payload
        match self.world.hostility:
            case "huge":
                values[:] = self.noise.choice(np.float32([1e20, 3.4e38, -3.4e38]))
            case "huge statistics":
                first = 0 if segment is None else self.arrays.sum._range(segment).start
                values[max(0, self.world.trained_length - first) :] = 3.4e38
            case "growing":
                values *= np.float32(30.0)
            case "tiny":
                values[:] = 1e-38
            case "not a number":
                values[self.noise.integers(values.size)] = np.nan
            case "constant":
                values[:] = 7.0
        return values.tobytes()


class HostileChecks(Checks):
    """What no hostile member may bring about."""

    def __init__(self, world):
        super().__init__()
        self.world = world
        self.longest = np.ones(2)

    def snapshot(self, device, arrays):
        super().snapshot(device, arrays)
        if device.name != self.world.hostile:
            self.longest = np.maximum(self.longest, arrays.sum.norms)
            open_ = self.world.hostility == "fast rounds, said openly"
            names = [member.name for member in arrays.proposal.members]
            assert not open_ or self.world.hostile not in names, "a round with a peer of another interval"

    def mean(self, device, arrays, mean):
        """Check that a mean is finite and not far longer than any honest model was."""
        who = (arrays.round, device.name, device.incarnation)
        assert who not in self.applied, "a mean is applied twice"
        self.applied.add(who)
        if device.name == self.world.hostile:
            return
        assert np.isfinite(mean).all()
        trained = self.world.trained_length
        norms = [np.linalg.norm(part.astype(np.float64)) for part in (mean[:trained], mean[trained:])]
        assert (norms <= 1.5 * TIMES_MAX * self.longest).all(), "a mean that is far too long"

    def paced(self, device):
        """Check that rounds do not follow each other faster than agreed: at most one in between is repeated."""
        if device.name == self.world.hostile or len(device.done) < 3:
            return
        (before_s, before_steps), _, (now_s, steps) = device.done[-3:]
        if self.world.settings.round_steps is None:
            assert now_s >= before_s + self.world.settings.round_every_s / 2, "rounds are faster than agreed"
        elif len(device.done) > ROUNDS_SEEN:
            before_s, before_steps = device.done[-ROUNDS_SEEN - 1]
            taken = steps - before_steps
            assert taken >= ROUND_STEPS / 2 * (ROUNDS_SEEN / 2 - 1), "rounds are faster than agreed"


class HostileWorld(World):
    """Three to six peers, of which one is hostile."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.seed = seed
        self.hostility = HOSTILITIES[seed % len(HOSTILITIES)]
        count, values = int(random.integers(3, 7)), int(random.choice([6, 20, 20, 40]))
        self.hostile = f"peer-{random.integers(count)}"
        self.trained_length = values - values // 4
        scale = 10.0 ** random.uniform(-2.0, 2.0)
        self.initial = random.normal(size=values, scale=scale).astype(np.float32)
        self.taught = random.normal(size=values, scale=scale).astype(np.float32)
        super().__init__(seed, count, values=values, settings=STEPS if random.random() < 0.25 else TIMES)
        self.checks = HostileChecks(self)

    def make_device(self, name, values):
        return (Hostile if name == self.hostile else Trainee)(self, name, values)

    @property
    def honest(self):
        """The honest devices."""
        return [device for device in self.devices.values() if device.name != self.hostile]


@dataclass
class HostileResult:
    """The result of a seed."""

    seed: int
    plan: PeerPlan
    hostility: str = ""
    failure: str = ""
    where: str = field(default="", compare=False)
    means_applied: int = 0
    least_steps_share: float = 1.0
    most_rounds_sent: float = 0.0
    virtual_s: float = 0.0


def run_hostile(seed, plan=None):
    """Run a seed, with its own faults or others."""
    world = HostileWorld(seed)
    names = [name for name in world.names if name != world.hostile]
    plan = PeerPlan(draw_faults(seed, names)) if plan is None else plan
    result = HostileResult(seed, plan, world.hostility)
    with noting_failure(result):
        _live_through(world, plan, result)
    result.means_applied = len(world.checks.applied)
    result.virtual_s = world.clock.now_s
    return result


def _live_through(world, plan, result):
    injector = Injector(world, plan.faults)
    world.start()
    world.pass_time(FAULTS_S)
    injector.heal()
    world.pass_time(CALM_S / 2)
    before = {device.name: device.rounds_done for device in world.honest}
    sent = {device.name: sum(device.sent_bytes.values()) for device in world.honest}
    world.pass_time(CALM_S / 2)

    def have_met():
        return any(device.rounds_done > before[device.name] for device in world.honest)

    # It can keep one device out of rounds: by proposals, or by spoiling only what it sends to that device.
    assert world.run(have_met, LEFT_OUT_S), "no round becomes whole"
    for device in world.honest:
        assert np.isfinite(device.disk).all(), "a model on disk that is not finite"
        device.last_finite.restore(device.model)
        assert np.isfinite(device.model).all(), "a model that is not finite"
        share = device.steps / device.steps_alone
        result.least_steps_share = min(result.least_steps_share, share)
        assert share >= STEPS_SHARE * (1 - DIVERGES), f"{device.steps} of {device.steps_alone} steps"
        rounds = device.rounds_done - before[device.name]
        sent_rounds = (sum(device.sent_bytes.values()) - sent[device.name]) / _round_bytes(world)
        result.most_rounds_sent = max(result.most_rounds_sent, sent_rounds / (rounds + 1))
        assert sent_rounds <= (FREE + 1) * (rounds + 1), f"{sent_rounds:.0f} rounds' bytes for {rounds} rounds"


def _round_bytes(world):
    """Return what a member sends in a round of all."""
    count, model_bytes = len(world.names), 4 * len(world.initial)
    return (count - 1) * model_bytes * (2 / count if world.settings.topology == "ring" else 1)
