"""Peers in virtual time: their cores, their trainers and the network between them, with checkers of every promise.

A model's values are numbers modulo a prime, so a mean is exact: a sum times the inverse of a count. A checker that
remembers all snapshots computes each mean again.
"""

import math
import random as randomness
from collections import Counter

import msgspec

from edgeasync.core.peer import effects as e
from edgeasync.core.peer import events as v
from edgeasync.core.peer.peer_core import PeerCore
from edgeasync.core.peer.settings import PeerCoreSettings
from edgeasync.protocol import wire
from edgeasync.protocol.peer_messages import PEER_MESSAGES, PeerPiece
from simulation.clock import VirtualClock

PRIME = 2**61 - 1
VALUE_BYTES = 8
HEADER_BYTES = 64
EVENTS_MAX = 60_000
STEP_S = 0.1
REFUSED_KINDS_MAX = 40
SPARE_VALUES = 8

SETTINGS = PeerCoreSettings(
    fingerprint="00ff",
    lease_s=1.0,
    ping_s=0.2,
    round_every_s=0.3,
    codec="exact",
    codecs=("exact", "coarse"),
    piece_bytes=24,
    window_bytes=72,
)


def encode(values, codec, salt):
    """Return values as bytes; `coarse` adds what depends on the device and the step."""
    noise = 0 if codec == "exact" else hash_of(salt)
    return b"".join([((value + noise) % PRIME).to_bytes(VALUE_BYTES, "big") for value in values])


def decode(payload):
    return [
        int.from_bytes(payload[begin : begin + VALUE_BYTES], "big")
        for begin in range(0, len(payload), VALUE_BYTES)
    ]


def hash_of(salt):
    return wire.checksum(repr(salt).encode())


class Arrays:
    """What a device holds for a round."""

    def __init__(self, effect):
        self.round = effect.round
        self.proposal = effect.proposal
        self.segments = effect.segments
        self.snapshot = self.sum = None
        self.incoming, self.checksums, self.outgoing = {}, {}, {}
        self.dropped = False

    def bounds(self, segment):
        length = len(self.snapshot)
        return segment * length // self.segments, (segment + 1) * length // self.segments

    @property
    def payload_bytes(self):
        return sum(map(len, self.incoming.values())) + sum(map(len, self.outgoing.values()))


class Device:
    """A peer's process, its trainer and its model, which survives both."""

    def __init__(self, world, name, values):
        self.world, self.name = world, name
        self.model = [world.random.randrange(PRIME) for _ in range(values)]
        self.incarnation = 0
        self.used = set()
        self.peers = tuple(world.names)
        self.core = self.arrays = None
        self.busy_until_s = self.hung_until_s = self.suspended_until_s = 0.0
        self.rots = self.fails = 0.0
        self.pending = 0
        self.trains = True
        self.steps = 0
        self.rounds = {}  # of this start: what was applied
        self.uplink_bytes_per_s = 100_000
        self.uplink_free_s = 0.0
        self.sent_bytes = Counter()
        self.reports = []
        world.clock.after(world.random.random() * STEP_S, self._step)

    @property
    def running(self):
        return self.core is not None

    def start(self, *, restored=False):
        if self.running:
            return
        if restored and self.used:  # a backup may bring an earlier number back, but not the same one
            self.incarnation = next(
                number for number in range(max(self.used) - 1, 0, -1) if number not in self.used
            )
        else:
            self.incarnation = max(self.used, default=0) + 10
        self.used.add(self.incarnation)
        self.core = PeerCore(self.name, self.incarnation, self.peers, self.world.settings)
        self.busy_until_s, self.pending, self.rounds = 0.0, 0, {}
        self.hung_until_s = self.suspended_until_s = 0.0
        self._do(self.core.begin)

    def kill(self):
        self.core = self.arrays = None

    def stop(self):
        self.handle(v.PeerStopRequested())

    def handle(self, event):
        self._do(lambda now_s: self.core.handle(event, now_s))

    def _do(self, decide):
        clock, core = self.world.clock, self.core
        if core is None:
            return
        if clock.now_s < self.suspended_until_s:
            clock.at(self.suspended_until_s, lambda: self.core is core and self._do(decide))
            return
        self.world.count_event()
        effects = decide(clock.now_s)
        core.rounds.check()
        assert len(core.refusals.counts) <= REFUSED_KINDS_MAX, "kinds of refusals are not bounded"
        for effect in effects:
            self._carry_out(effect)
        self._check_memory()
        if self.core is core:
            self._arm(core)

    def _arm(self, core):
        deadline_s = core.next_deadline_s
        if deadline_s == math.inf:
            return
        self._armed = armed = (core, deadline_s)
        self.world.clock.at(deadline_s, lambda: self._armed is armed and self.core is core and self._do(core.tick))

    def _step(self):
        """Take a local step: a hung trainer takes it later, training never waits for a round."""
        clock = self.world.clock
        clock.after(STEP_S, self._step)
        if self.running and self.trains and clock.now_s >= max(self.hung_until_s, self.suspended_until_s):
            step = self.world.random.randrange(1000)
            self.model = [(value + step) % PRIME for value in self.model]
            self.steps += 1

    # -- effects -----------------------------------------------------------------------------------------------

    def _carry_out(self, effect):  # noqa: C901, PLR0912 (a table: a line or two for each effect)
        arrays = self.arrays
        match effect:
            case e.SendToPeer():
                assert effect.peer != self.name
                self.world.send(self, effect.peer, effect.message)
            case e.SendPiece():
                assert arrays.round == effect.round
                assert not arrays.dropped
                part = arrays.outgoing[effect.step][effect.offset : effect.offset + effect.length]
                assert len(part) == effect.length > 0
                if self.world.random.random() < self.rots:
                    part = bytes([part[0] ^ 1]) + part[1:]
                piece = PeerPiece(effect.round, effect.step, effect.offset, wire.checksum(part))
                self.sent_bytes[effect.round] += len(part)
                self.world.send(self, effect.peer, piece, part)
            case e.TakeSnapshot():
                assert arrays is None, "arrays of two rounds at once"
                self.arrays = Arrays(effect)
                self._work(self._snapshot, effect)
            case e.Encode():
                self._work(self._encode, effect)
            case e.Decode():
                self._work(self._decode, effect)
            case e.ApplyMean():
                assert not arrays.dropped
                self._work(self._apply, effect)
            case e.ForwardPayload():
                arrays.outgoing[effect.step] = bytes(arrays.incoming[effect.received_step])
            case e.OpenPayload():
                assert effect.step not in arrays.incoming
                arrays.incoming[effect.step] = bytearray(effect.payload_bytes)
                arrays.checksums[effect.step] = effect.checksum
            case e.StorePiece():
                part = self.world.part
                arrays.incoming[effect.step][effect.offset : effect.offset + len(part)] = part
            case e.ReleasePayload():
                del (arrays.incoming if effect.incoming else arrays.outgoing)[effect.step]
            case e.DropRound():
                assert arrays.round == effect.round
                arrays.dropped = True
                self._drop_if_done()
            case e.PeerReport():
                self.reports.append((self.world.clock.now_s, effect))
            case e.EndPeer():
                self.kill()

    def _drop_if_done(self):
        if self.arrays is not None and self.arrays.dropped and not self.pending:
            self.arrays = None

    def _work(self, do, effect):
        """Do work behind what the trainer does already, then report it."""
        clock, core = self.world.clock, self.core
        self.pending += 1
        self.busy_until_s = max(clock.now_s, self.busy_until_s) + self.world.random.uniform(0.0, 0.01)

        def perform():
            if self.core is not core:
                return
            stopped_until_s = max(self.hung_until_s, self.suspended_until_s)
            if clock.now_s < stopped_until_s:
                clock.at(stopped_until_s, perform)
                return
            self.pending -= 1
            if self.world.random.random() < self.fails:
                event = v.WorkFailed(effect.round, "no memory")
            else:
                event = do(effect)
            self._drop_if_done()
            self.handle(event)

        clock.at(self.busy_until_s, perform)

    def _snapshot(self, effect):
        arrays = self.arrays
        if not arrays.dropped:
            arrays.snapshot = list(self.model)
            ring = arrays.proposal.topology == "ring"
            arrays.sum = list(self.model) if ring else [0] * len(self.model)
            self.world.checks.snapshot(self, arrays)
        return v.SnapshotTaken(effect.round)

    def _encode(self, effect):
        arrays = self.arrays
        begin, end = arrays.bounds(effect.segment)
        count, codec = len(arrays.proposal.members), arrays.proposal.codec
        salt = (self.name, effect.round, effect.step)
        if effect.source == "snapshot":
            payload = encode(arrays.snapshot[begin:end], codec, salt)
        elif effect.source == "sum":
            payload = encode(arrays.sum[begin:end], codec, salt)
        else:
            share = pow(count, -1, PRIME)
            payload = encode([value * share % PRIME for value in arrays.sum[begin:end]], codec, salt)
            arrays.sum[begin:end] = decode(payload)
        arrays.outgoing[effect.step] = payload
        return v.Encoded(effect.round, effect.step, len(payload), wire.checksum(payload))

    def _decode(self, effect):
        arrays = self.arrays
        begin, end = arrays.bounds(effect.segment)
        payload = arrays.outgoing[effect.step] if effect.own else arrays.incoming[effect.step]
        sound = effect.own or wire.checksum(payload) == arrays.checksums[effect.step]
        if not sound or len(payload) != VALUE_BYTES * (end - begin):
            return v.Decoded(effect.round, effect.step, sound=False)
        values = decode(payload)
        if effect.way == "add":
            weight = (
                1 if arrays.proposal.codec == "exact" else 3
            )  # a coarse sum depends on its order, as floats do
            before = arrays.sum[begin:end]
            values = [(weight * one + other) % PRIME for one, other in zip(before, values, strict=True)]
        arrays.sum[begin:end] = values
        return v.Decoded(effect.round, effect.step)

    def _apply(self, effect):
        arrays = self.arrays
        assert not arrays.incoming, "payloads are not released"
        mean = arrays.sum
        if arrays.proposal.topology == "all_to_all":
            share = pow(len(arrays.proposal.members), -1, PRIME)
            mean = [value * share % PRIME for value in mean]
        self.world.checks.mean(self, arrays, mean)
        self.model = [
            (own + new - old) % PRIME for own, new, old in zip(self.model, mean, arrays.snapshot, strict=True)
        ]
        self.rounds[effect.round] = self.world.clock.now_s
        return v.MeanApplied(effect.round)

    def _check_memory(self):
        if self.arrays is None:
            return
        proposal = self.arrays.proposal
        models = 4 if proposal.topology == "ring" else len(proposal.members) + 1
        bound = models * VALUE_BYTES * (len(self.model) + SPARE_VALUES)
        assert self.arrays.payload_bytes <= bound, "payloads of more than a round"


class Checks:
    """Remembers every snapshot, and computes every mean again."""

    def __init__(self):
        self.snapshots = {}
        self.means = {}
        self.applied = set()

    def snapshot(self, device, arrays):
        key = (arrays.round, device.name, device.incarnation)
        assert key not in self.snapshots, "two snapshots of a member for one round"
        self.snapshots[key] = arrays.snapshot

    def mean(self, device, arrays, mean):
        """Check that a mean is that of all members' snapshots, and the same for all of them."""
        who = (arrays.round, device.name, device.incarnation)
        assert not arrays.dropped, "the mean of a round that was given up"
        assert who not in self.applied, "a mean is applied twice"
        self.applied.add(who)
        members = [
            self.snapshots.get((arrays.round, member.name, member.incarnation))
            for member in arrays.proposal.members
        ]
        assert None not in members, "a mean without a member"
        if arrays.proposal.codec == "exact":
            share = pow(len(members), -1, PRIME)
            expected = [sum(values) * share % PRIME for values in zip(*members, strict=True)]
            assert mean == expected, "a mean that is not that of the members' snapshots"
        assert self.means.setdefault(arrays.round, mean) == mean, "two means of one round"


class World:
    """Devices, the links between them, and what is wrong with these."""

    def make_device(self, name, values):
        """Return the device of this name, which does not run yet."""
        return Device(self, name, values)

    def __init__(self, seed, count=None, *, topology=None, values=None, settings=SETTINGS):
        self.random = randomness.Random(seed)
        count = count or self.random.choice((2, 3, 3, 4, 4, 5, 6))
        self.names = [f"peer-{number}" for number in range(count)]
        topology = topology or self.random.choice(("ring", "ring", "all_to_all"))
        codec = self.random.choice(("exact", "exact", "coarse")) if settings is SETTINGS else settings.codec
        values = values or self.random.choice((2, count * 3, 20, 20, 20))
        self.settings = msgspec.structs.replace(
            settings,
            topology=topology,
            codec=codec,
            payload_bytes_max=VALUE_BYTES * values,
            window_bytes=self.random.choice((24, 72, 240)) if settings is SETTINGS else settings.window_bytes,
        )
        self.clock = VirtualClock()
        self.checks = Checks()
        self.events = 0
        self.part = None
        self.cut = {}  # (from, to) -> until when nothing passes
        self.bad = {}  # (from, to) -> (until when, Trouble)
        self.arrivals = {}
        self.latency_s = {
            (one, other): self.random.uniform(0.001, 0.008) for one in self.names for other in self.names
        }
        self.devices = {name: self.make_device(name, values) for name in self.names}

    def start(self):
        """Start all devices at once."""
        for device in self.devices.values():
            device.start()

    def count_event(self):
        self.events += 1
        assert self.events <= EVENTS_MAX, "it spins"

    def send(self, sender, name, message, part=None):
        """Send a message, which arrives in order with others unless a fault says otherwise."""
        clock, link = self.clock, (sender.name, name)
        size = HEADER_BYTES + len(part or b"")
        sender.uplink_free_s = max(clock.now_s, sender.uplink_free_s) + size / sender.uplink_bytes_per_s
        if name not in self.devices or clock.now_s < self.cut.get(link, 0.0):
            return
        arrives_s = max(sender.uplink_free_s + self.latency_s[link], self.arrivals.get(link, 0.0))
        self.arrivals[link] = arrives_s
        until_s, trouble = self.bad.get(link, (0.0, None))
        if clock.now_s >= until_s:
            clock.at(arrives_s, lambda: self._arrive(link, message, part))
            return
        for delay_s, malformed, met in trouble.meet(message, part, self.random):
            clock.at(
                arrives_s + delay_s, lambda met=met, bad=malformed: self._arrive(link, message, met, malformed=bad)
            )

    def _arrive(self, link, message, part, *, malformed=False):
        sender, name = link
        device = self.devices[name]
        if not device.running or self.clock.now_s < self.cut.get(link, 0.0):
            return
        if malformed:
            device.handle(v.PeerReceivedMalformed(sender, "bits were flipped"))
            return
        is_piece = isinstance(message, PeerPiece)
        sound = not is_piece or wire.checksum(part) == message.checksum
        event = v.PeerReceived(sender, message, len(part or b""), sound)
        if device.suspended_until_s > self.clock.now_s:  # it waits in the socket's queue
            self.clock.at(device.suspended_until_s, lambda: self._arrive(link, message, part))
            return
        self.part = part
        device.handle(event)

    def run(self, until, for_s):
        """Let time pass until something holds; return whether it did."""
        return self.clock.run(until, self.clock.now_s + for_s)

    def pass_time(self, for_s):
        self.run(lambda: False, for_s)

    def completed(self, name):
        core = self.devices[name].core
        return None if core is None else core.rounds.completed

    def members(self, round_id):
        """Return who was in a round, by the snapshots that were taken for it."""
        return {name for known, name, _ in self.checks.snapshots if known == round_id}


def on_the_wire(message):
    """Return a message as it is after it was sent."""
    version, kind, fields, _ = msgspec.msgpack.decode(wire.encode(message))
    assert version
    return msgspec.convert(fields, PEER_MESSAGES[kind], builtin_types=(bytes,))
