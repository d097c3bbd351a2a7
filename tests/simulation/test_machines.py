"""Both machines together, on a network that loses, repeats, delays and reorders whatever it likes.

Hypothesis drives a world of one hub core and several device cores, and shrinks what breaks it. The world checks
after every step: the cores' own `check`, and what a bystander who remembers everything can see.
"""

from dataclasses import dataclass
from itertools import count
from random import Random

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeasync.core.device import effects as e
from edgeasync.core.device import events as d
from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.throttle import ThrottleReadings, ThrottleSection
from edgeasync.core.hub.effects import (
    Assign,
    Discard,
    Fold,
    Keep,
    Receive,
    Restore,
    SendGraph,
    SendStatus,
    SendToDevice,
    SuspendTransfers,
)
from edgeasync.core.hub.events import Folded, Heard, HubReceived, HubReceivedMalformed, PushArrived, Ticked
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits, Liveness
from edgeasync.core.recovery.state import dump_state, load_state
from edgeasync.measurements.medians import WINDOW
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ImmediateAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.frequency import AdaptiveFrequency, FixedFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy, WarmUp
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import (
    Ack,
    Assignment,
    Duplicate,
    GraphHeader,
    Hello,
    ModelVersion,
    Order,
    Push,
    StatusRequest,
    Welcome,
)
from tests.support.simulation.whims import ROLLBACK, WARNING
from tests.support.size import repetitions

SPEC = ParameterSpec((Parameter("weights", (3,)),))
LINEAGE = "00c0ffee00c0ffee"
NAMES = ("a", "b", "c")
REFLASHES_MAX = 7  # the hub remembers eight retired states, and a packet of any of them may still be on its way
GRAPHS = [None, ShippedGraph(b"a graph")]
LATENCY_S, STEP_S, SUPERVISOR_S = 0.01, 0.05, 1.0
FREQUENCY = FixedFrequency()


@dataclass(frozen=True)
class Buffer:
    """The mean of `count` updates, or of what there is after `wait_s`."""

    count: int
    wait_s: float | None = None
    answer: str = "at_flush"
    update: str = "delta"

    def flush_at_s(self, buffered, fleet):
        if len(buffered) >= self.count:
            return buffered[-1].arrived_s
        return None if self.wait_s is None else buffered[0].arrived_s + self.wait_s

    def weights(self, buffered, fleet):
        return tuple(contribution.weight / len(buffered) for contribution in buffered)


ADAPTIVE = AdaptiveFrequency()
BUFFERED = BufferedAggregator(count=3, wait_s_max=4.0)
ROUNDS = SynchronousAggregator()
# Each waits for devices, drops updates or goes back in another way.
POLICIES = {
    "immediate": {"aggregate": ImmediateAggregator()},
    "buffer of 2": {"aggregate": Buffer(2)},
    "buffer of 3, now": {"aggregate": Buffer(3, answer="now")},
    "buffer of 9 or 4 s": {"aggregate": Buffer(9, wait_s=4.0)},
    "quorum": {"aggregate": QuorumAggregator(), "frequency": ADAPTIVE},
    "buffered": {"aggregate": BUFFERED, "frequency": ADAPTIVE, "monitor": WARNING, "trust": "open"},
    "synchronous": {"aggregate": ROUNDS, "monitor": WARNING, "behind_max": 1.5, "preempt": True},
    "model_average": {"aggregate": ModelAverageAggregator(), "take": "best", "monitor": ROLLBACK},
    "rounds that go back": {"aggregate": ROUNDS, "monitor": ROLLBACK, "frequency": ADAPTIVE},
    "quorum that goes back": {"aggregate": QuorumAggregator(share=0.5), "monitor": ROLLBACK, "take": "best"},
    "buffered that goes back": {"aggregate": BUFFERED, "monitor": ROLLBACK, "behind_max": 3.0, "preempt": True},
    "warm-up": {"aggregate": ImmediateAggregator(), "warm_up": WarmUp(updates=7), "monitor": ROLLBACK},
}


def inverse_root(staleness):
    assert staleness.versions >= 0
    return None if staleness.versions > 20 else (1 + staleness.versions) ** -0.5


class Payload(msgspec.Struct, frozen=True):
    """A push with its payload: in one message, or the last piece of a transfer."""

    push: Push


class Grant(msgspec.Struct, frozen=True):
    """The first credit of a transfer."""

    push: Push


class Packet(msgspec.Struct, frozen=True):
    due_s: float
    peer: bytes
    content: object


class Node:
    """A device: its core, its connection, and a worker that does one thing after the other."""

    def __init__(self, name, in_pieces, random):
        self.name = name
        self.in_pieces = in_pieces
        self.random = random
        self.state = 1
        self.start = self.steps = self.trained = 0
        self.peer = self.memory = self.core = None
        self.graph = False
        self.jobs = []

    @property
    def state_id(self):
        return self.name.encode() * 8 + self.state.to_bytes(8, "big")

    def boot(self):
        self.start += 1
        self.peer, self.memory, self.jobs, self.steps = None, None, [], 0
        self.core = DeviceCore(
            Hello(self.name, self.state_id, self.start),
            DeviceLimits(graph_bytes_max=1000),
            Random(self.random.random()),
            throttle=ThrottleSection(temperature_c_max=80.0, temperature_c_slow=75.0),
        )


class World:
    def __init__(self, policy, seed, graph=None, *, sick=""):
        random = Random(seed)
        self.sick = sick
        self.restored = self.rollbacks = 0
        self.now_s = 0.0
        self.up, self.down = [], []
        self.granted = {}
        self.owners = {}
        self.held = {}
        self.folded_pushes, self.folded_updates = set(), set()
        self.answered = {}
        self.excluded = set()
        """The devices that an operator has excluded."""
        self.sessions = {}
        self.events = self.uid = self.version = 0
        self._handles, self._peers, self._sessions = count(), count(1), count(1)
        self.policy = Policy(
            **{"staleness": inverse_root, "optimizer": (SGD(),), "frequency": FREQUENCY} | POLICIES[policy]
        )
        self.graph = graph
        self.hub = self._make_hub()
        self.nodes = [Node(name, name == "b", random) for name in NAMES]
        for node in self.nodes:
            self.restart(node)

    def _make_hub(self):
        return HubCore(
            spec=SPEC,
            training={},
            policy=self.policy,
            settings=HubCoreSettings(
                codec=FLOAT32,
                liveness=Liveness(progress_s=20.0),
                limits=Limits(devices_max=len(NAMES), strikes_max=4, quarantine_s=20.0, updates_held_max=6),
            ),
            version=ModelVersion(LINEAGE, 0),
            graph=self.graph,
            make_session=lambda: next(self._sessions).to_bytes(16, "big"),
            now_s=self.now_s,
        )

    # -- devices ---------------------------------------------------------------------------------------------

    def restart(self, node):
        node.boot()
        self._device_did(node, node.core.begin(self.now_s))

    def reflash(self, node):
        node.state += 1
        node.start = 0
        node.graph = False
        self.restart(node)

    def tick_device(self, node):
        self._device_did(node, node.core.tick(self.now_s, node.steps))
        deadline_s = node.core.next_deadline_s()
        assert deadline_s is None or deadline_s > self.now_s

    def sense(self, node, temperature_c):
        self._device_did(node, node.core.handle(d.Sensed(ThrottleReadings(temperature_c)), self.now_s))
        self.tick_device(node)

    def work(self, node, *, broken=False):
        """Let the worker finish the next thing it has to do."""
        _, event = node.jobs.pop(0)
        if isinstance(event, d.ModelInstalled):
            node.memory = None if broken else event.assignment.version
            event = d.InstallFailed("broken") if broken else event
        if isinstance(event, d.GraphHeld) and event.fetched:
            node.graph = not broken
            event = d.GraphBroken("broken") if broken else event
        if isinstance(event, d.Trained):
            node.steps += event.local_steps
            node.trained += 1
        self._device_did(node, node.core.handle(event, self.now_s))

    def _device_did(self, node, effects):  # noqa: C901 (a table, one row for each effect)
        for effect in effects:
            match effect:
                case e.Connect():
                    node.peer = next(self._peers).to_bytes(5, "big")
                    self.owners[node.peer] = (node.name, node.state_id)
                case e.CloseConnection():
                    node.peer = None
                case e.SendToHub():
                    self._send_up(node, effect.message)
                case e.SendPush():
                    push = effect.push
                    if node.in_pieces:
                        self._send_up(node, msgspec.structs.replace(push, transfer=push.seq))
                    else:
                        self._send_up(node, Payload(push))
                case e.FindGraph():
                    found = d.GraphHeld(fetched=False) if node.graph else d.GraphMissing()
                    node.jobs.append((self.now_s + STEP_S, found))
                case e.TakeGraph():
                    node.jobs.append((self.now_s + STEP_S, d.GraphHeld(fetched=True)))
                case e.PrepareTraining():
                    assert node.graph or self.hub.graph is None, "joins without the hub's graph"
                case e.InstallModel():
                    node.jobs.append((self.now_s + STEP_S, d.ModelInstalled(effect.assignment)))
                case e.Train():
                    # What still waits to be decoded is decoded first, into the same memory.
                    decoded = [
                        event.assignment.version for _, event in node.jobs if isinstance(event, d.ModelInstalled)
                    ]
                    assert node.core.work.held.version == [node.memory, *decoded][-1], (
                        "trains from another model than it says"
                    )
                    self.uid += 1
                    score = float(self.uid % 9)
                    trained = d.Trained(
                        effect.local_steps, self.uid, float(self.uid), 0.1, STEP_S, score, checksum=self.uid
                    )
                    node.jobs.append((self.now_s + effect.local_steps * STEP_S, trained))
        assert node.core.link in ("over", "offline") or node.peer is not None

    def _send_up(self, node, content):
        assert node.peer is not None
        self.up.append(Packet(self.now_s + LATENCY_S, node.peer, content))

    # -- the network -----------------------------------------------------------------------------------------

    def deliver_up(self, index=0, *, capacity=True):
        packet = self.up.pop(index)
        peer, content = packet.peer, packet.content
        if not isinstance(content, Payload):
            self._give(HubReceived(peer, content, capacity))
        elif content.push.transfer and self.granted.pop(peer, None) != content.push:
            self._give(HubReceivedMalformed(peer, "piece without a transfer", strike=False))
        else:
            self._give(self._arrived(peer, content.push, capacity=capacity))

    def _arrived(self, peer, push, *, capacity):
        handle = next(self._handles)
        self.held[handle] = (*self.owners[peer], push.seq, push.examples, push.base.number)
        broken = push.examples % 7 == 0 or self.owners[peer][0] in self.sick
        norm = float("nan") if broken else 1.0
        return PushArrived(peer, push, handle, norm, capacity)

    def deliver_down(self, index=0):
        packet = self.down.pop(index)
        node = next((node for node in self.nodes if node.peer == packet.peer), None)
        if node is None or node.core.link == "over":
            return
        if isinstance(packet.content, Grant):
            self._device_did(node, node.core.handle(d.TransferMoved(), self.now_s))
            self._send_up(node, Payload(packet.content.push))
        else:
            self._device_did(node, node.core.handle(d.DeviceReceived(packet.content), self.now_s))

    def garbage(self, peer):
        self._give(HubReceivedMalformed(peer, "nonsense"))

    # -- the hub ---------------------------------------------------------------------------------------------

    def restart_hub(self):
        """Let another core resume from this one's state; counts of messages begin again."""
        written = dump_state(self.hub)
        self.hub, self.events = self._make_hub(), 0
        load_state(self.hub, written)
        assert dump_state(self.hub) == written

    def order(self, name, order):
        """Give an operator's order, and look how it is answered; whose update it drops is answered next."""
        obeys = name in self.hub.members.members and self.policy.trust != "open"
        if obeys:
            change = self.excluded.add if order == "quarantine" else self.excluded.discard
            change(name)
        self.events += 1
        effects = self.hub.handle(HubReceived(b"operator", Order(name, order)), self.now_s)
        (answer,) = [effect for effect in effects if isinstance(effect, SendStatus | SendToDevice)]
        assert isinstance(answer, SendStatus) == obeys
        self._hub_did([effect for effect in effects if effect is not answer])
        self.tick_hub()

    def tick_hub(self, *, capacity=True):
        self._hub_did(self.hub.handle(Ticked(capacity), self.now_s))
        assert self.hub.next_deadline_s() > self.now_s

    def _give(self, event):
        self.events += 1
        self._hub_did(self.hub.handle(event, self.now_s))

    def _hub_did(self, effects):  # noqa: C901, PLR0912 (a table, one row for each effect)
        for effect in effects:
            match effect:
                case Fold():
                    self._folded(effect)
                case Discard():
                    del self.held[effect.handle]
                case Restore():
                    self.version += 1
                    assert effect.number == self.version
                    self.restored = effect.number
                    self.rollbacks += 1
                case Keep():
                    assert not self.hub.policy_engine.divergence.is_active("rollback")
                case Receive():
                    self.granted[effect.peer] = effect.push
                    self._send_down(effect.peer, Grant(effect.push))
                case SendGraph():
                    graph = self.hub.graph
                    answer = GraphHeader(graph.fingerprint, graph.checksum, len(graph.payload))
                    self._send_down(effect.peer, answer)
                case SuspendTransfers():
                    self.granted.pop(effect.peer, None)
                case Assign():
                    assert effect.version == ModelVersion(LINEAGE, self.version)
                    if effect.ack is not None:
                        self._acknowledged(effect.peer, effect.ack)
                    answer = Assignment(effect.version, effect.local_steps, effect.codec, 0, 12, 0, effect.ack)
                    self._send_down(effect.peer, answer)
                case SendToDevice():
                    if isinstance(effect.message, Ack):
                        self._acknowledged(effect.peer, effect.message)
                    if isinstance(effect.message, Welcome):
                        name, _ = self.owners[effect.peer]
                        assert self.sessions.setdefault(effect.message.session, name) == name
                    self._send_down(effect.peer, effect.message)
                case SendStatus():
                    self.hub.status(self.now_s)

    def _send_down(self, peer, content):
        assert peer in self.owners
        self.down.append(Packet(self.now_s + LATENCY_S, peer, content))

    def _folded(self, fold):
        self.version += 1
        assert fold.number == self.version
        assert len(fold.handles) == len(fold.weights) == len(set(fold.handles)) > 0
        if fold.measure:
            assert self.hub.handle(Folded(fold.number, 0.1), self.now_s) == []
        for handle in fold.handles:
            name, state_id, seq, uid, base = self.held.pop(handle)
            assert self.restored <= base < fold.number, "learnt from what is no more"
            assert name not in self.excluded, "an update counts that an operator has excluded"
            assert (name, state_id, seq) not in self.folded_pushes, "a push was folded twice"
            assert uid not in self.folded_updates, "an update was folded twice, under two numbers"
            self.folded_pushes.add((name, state_id, seq))
            self.folded_updates.add(uid)

    def _acknowledged(self, peer, ack):
        """First answers of a state id come in order, without a gap; a duplicate is of the last of them."""
        owner = self.owners[peer]
        last = self.answered.get(owner, 0)
        assert ack.seq == (last if isinstance(ack.outcome, Duplicate) else last + 1)
        self.answered[owner] = ack.seq

    def check(self):
        hub, tables = self.hub, self.hub.members
        hub.check()
        assert hub.version == self.version
        assert len(self.held) == hub.status(self.now_s)["updates_buffered"]
        assert sum(hub.messages_accepted.values()) + hub.messages_refused == self.events
        assert hub.updates_applied == len(self.folded_updates)
        engine = hub.policy_engine
        assert engine.state.divergence.rollbacks == self.rollbacks
        divergence = engine.state.divergence
        assert divergence.devices.keys() <= set(NAMES)
        assert all(alarm.causes for alarm in (*divergence.devices.values(), *divergence.fleet.values()))
        assert divergence.orders.keys() == self.excluded
        assert engine.state.electorate.spoken.keys() <= {
            name for name, member in tables.members.items() if member.live
        }
        assert not engine.state.gathering.measuring
        assert (
            max(map(len, (engine.state.fleet.norms, engine.state.fleet.scores, engine.state.fleet.losses)))
            <= WINDOW
        )
        if not engine.gathering.count:
            assert not any(member.waiting for member in tables.members.values()), "nothing will wake them"
        assert len(tables._by_session) <= len(NAMES)
        assert len(tables._by_peer) <= len(NAMES)
        assert len(tables._leases) <= len(NAMES)
        for session, member in tables._by_session.items():
            assert self.sessions[session] == member.device_id
        for member in tables.members.values():
            assert len(member.retired) <= REFLASHES_MAX
            assert member.state_id not in member.retired
            assert member.measurements.staleness >= 0
            assert member.seq_last == self.answered.get((member.device_id, member.state_id), 0)

    # -- peace -----------------------------------------------------------------------------------------------

    def run(self, seconds):
        """A sound network and a supervisor that starts devices again, for some virtual seconds."""
        until_s = self.now_s + seconds
        self.up = [msgspec.structs.replace(packet, due_s=min(packet.due_s, self.now_s)) for packet in self.up]
        while True:
            due_s, act = self._next()
            if due_s > until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, due_s)
            act()
            self.check()

    def _next(self):
        due = [(self.hub.next_deadline_s(), self.tick_hub)]
        if self.up:
            due.append((self.up[0].due_s, self.deliver_up))
        if self.down:
            due.append((self.down[0].due_s, self.deliver_down))
        for node in self.nodes:
            if (deadline_s := node.core.next_deadline_s()) is None:
                due.append((self.now_s + SUPERVISOR_S, lambda node=node: self.restart(node)))
                continue
            due.append((deadline_s, lambda node=node: self.tick_device(node)))
            if node.jobs:
                due.append((node.jobs[0][0], lambda node=node: self.work(node)))
        return min(due, key=lambda row: row[0])


# -- safety --------------------------------------------------------------------------------------------------


class AnyNetwork(RuleBasedStateMachine):
    """Every choice is Hypothesis's own."""

    @initialize(
        policy=st.sampled_from(list(POLICIES)),
        seed=st.integers(0, 9),
        graph=st.sampled_from(GRAPHS),
        seconds=st.sampled_from([0, 3, 20]),
    )
    def begin(self, policy, seed, graph, seconds):
        self.world = World(policy, seed, graph)
        self.world.run(seconds)

    def some_up(self):
        return bool(self.world.up)

    def some_down(self):
        return bool(self.world.down)

    indices = st.integers(0, 1000)
    nodes = st.integers(0, len(NAMES) - 1)

    @precondition(some_up)
    @rule(index=indices, capacity=st.booleans())
    def deliver_up(self, index, capacity):
        self.world.deliver_up(index % len(self.world.up), capacity=capacity)

    @precondition(some_down)
    @rule(index=indices)
    def deliver_down(self, index):
        self.world.deliver_down(index % len(self.world.down))

    @rule(index=indices, up=st.booleans())
    def drop(self, index, up):
        packets = self.world.up if up else self.world.down
        if packets:
            packets.pop(index % len(packets))

    @rule(index=indices, up=st.booleans())
    def duplicate(self, index, up):
        packets = self.world.up if up else self.world.down
        if packets:
            packets.append(packets[index % len(packets)])

    @rule(node=nodes, broken=st.sampled_from([False, False, False, True]))
    def work(self, node, broken):
        if self.world.nodes[node].jobs:
            self.world.work(self.world.nodes[node], broken=broken)

    @rule(node=nodes, temperature_c=st.sampled_from([60.0, 76.0, 85.0]))
    def sense(self, node, temperature_c):
        self.world.sense(self.world.nodes[node], temperature_c)

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 5.0, 16.0, 60.0]), hub=st.booleans(), capacity=st.booleans())
    def time_passes(self, seconds, hub, capacity):
        self.world.now_s += seconds
        if hub:
            self.world.tick_hub(capacity=capacity)
        for node in self.world.nodes:
            self.world.tick_device(node)

    @rule(seconds=st.sampled_from([0.02, 1.0, 4.0, 20.0]))
    def all_is_well_for_a_while(self, seconds):
        self.world.run(seconds)

    @rule(node=nodes)
    def restart(self, node):
        self.world.restart(self.world.nodes[node])

    @rule(node=nodes, order=st.sampled_from(["quarantine", "release"]))
    def order(self, node, order):
        self.world.order(NAMES[node], order)

    @rule()
    def restart_hub(self):
        self.world.restart_hub()

    @rule(node=nodes)
    def reflash(self, node):
        if self.world.nodes[node].state <= REFLASHES_MAX:
            self.world.reflash(self.world.nodes[node])

    @rule(index=indices, status=st.booleans())
    def nonsense(self, index, status):
        peers = list(self.world.owners)
        peer = peers[index % len(peers)]
        if status:
            self.world._give(HubReceived(peer, StatusRequest()))
        else:
            self.world.garbage(peer)

    @rule(index=indices, kind=st.sampled_from(["piece", "credit"]))
    def sign_of_life(self, index, kind):
        peers = list(self.world.owners)
        self.world._give(Heard(peers[index % len(peers)], kind))

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()


TestAnyNetwork = AnyNetwork.TestCase
TestAnyNetwork.settings = settings(
    max_examples=repetitions("random networks of cores"),
    stateful_step_count=repetitions("steps of a random network"),
)


# -- liveness ------------------------------------------------------------------------------------------------


def fault(world, random):  # noqa: C901, PLR0912 (a table, one row for each fault)
    """Do one bad thing, or let some time pass well."""
    packets = random.choice([world.up, world.down])
    node = random.choice(world.nodes)
    match random.choices(
        [
            "well",
            "drop",
            "duplicate",
            "shuffle",
            "busy",
            "late",
            "restart",
            "reflash",
            "broken",
            "nonsense",
            "hub",
            "heat",
            "order",
        ],
        [40, 15, 15, 10, 10, 6, 3, 1, 4, 2, 2, 4, 4],
    )[0]:
        case "well":
            world.run(random.choice([0.02, 0.1, 1.0]))
        case "drop" if packets:
            packets.pop(random.randrange(len(packets)))
        case "duplicate" if packets:
            packets.append(random.choice(packets))
        case "shuffle":
            random.shuffle(packets)
        case "busy" if world.up:
            world.deliver_up(random.randrange(len(world.up)), capacity=False)
        case "late":
            world.now_s += random.choice([1.0, 7.0, 20.0])
        case "restart":
            world.restart(node)
        case "reflash" if node.state <= REFLASHES_MAX:
            world.reflash(node)
        case "broken" if node.jobs:
            world.work(node, broken=True)
        case "nonsense" if node.peer is not None:
            world.garbage(node.peer)
        case "hub":
            world.restart_hub()
        case "heat":
            world.sense(node, random.choice([60.0, 76.0, 85.0]))
        case "order":
            world.order(node.name, random.choice(["quarantine", "release"]))
    world.check()


@pytest.mark.parametrize("seed", range(repetitions("networks that heal")))
def test_when_the_faults_end_everybody_trains_again(seed):
    """A lease for the lost, a quarantine, a refusal or two with their waits: two minutes are enough."""
    random = Random(seed)
    world = World(list(POLICIES)[seed % len(POLICIES)], seed, GRAPHS[seed // 4 % 2])
    for _ in range(400):
        fault(world, random)
    world.run(10.0)
    for node in world.nodes:
        world.sense(node, 60.0)
        world.order(node.name, "release")
    world.run(110.0)
    before = [(node.trained, node.start, world.hub.updates_applied) for node in world.nodes]
    world.run(60.0)
    for node, (trained, start, updates_applied) in zip(world.nodes, before, strict=True):
        assert node.core.link == "joined", node.name
        assert node.start == start, f"{node.name} had to be started again"
        assert node.trained >= trained + 3, node.name
        assert world.hub.updates_applied >= updates_applied + 9
    states = [member.state for member in world.hub.members.members.values()]
    assert states == ["training"] * len(NAMES)


def test_a_peaceful_world_loses_no_update():
    world = World("immediate", 0)
    world.run(60.0)
    trained = sum(node.trained for node in world.nodes)
    rejected = world.hub.updates_rejected
    assert trained > 150
    assert world.hub.messages_refused == world.hub.duplicates == 0
    assert trained - len(NAMES) <= world.hub.updates_applied + rejected <= trained


@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_whose_updates_never_count_holds_up_nobody(policy):
    world = World(policy, 0, sick="c")
    world.run(60.0)
    before = [node.trained for node in world.nodes], world.version, world.hub.updates_applied
    world.run(60.0)
    trained = [node.trained - was for node, was in zip(world.nodes, before[0], strict=True)]
    assert min(trained) >= 12
    assert world.version >= before[1] + 6
    assert world.hub.updates_applied >= before[2] + 9
    assert not any(name == "c" for name, _, _ in world.folded_pushes)
    assert not any(node.core.unexpected.counts for node in world.nodes), "nothing comes that does not fit"


@pytest.mark.parametrize("policy", [name for name, parts in POLICIES.items() if "trust" not in parts])
def test_a_device_that_an_operator_excludes_holds_up_nobody(policy):
    """Not even if it is silent from then on; and it trains on."""
    world = World(policy, 0)
    world.run(30.0)
    world.order("c", "quarantine")
    for silent in (False, True):
        if silent:
            world.nodes[2].core.handle = lambda *_: []
        before = [node.trained for node in world.nodes], world.version, world.hub.updates_applied
        world.run(14.0)  # a device without progress is lost after 20 s
        trained = [node.trained - was for node, was in zip(world.nodes, before[0], strict=True)]
        assert min(trained[:2] if silent else trained) >= 3
        assert world.version >= before[1] + 2
        assert world.hub.updates_applied >= before[2] + 3


def test_policies_that_go_back_do():
    for policy in [name for name, parts in POLICIES.items() if parts.get("monitor") is ROLLBACK]:
        world = World(policy, 0)
        world.run(120.0)
        assert world.rollbacks >= 2, policy
        assert world.hub.updates_applied > 30, policy
