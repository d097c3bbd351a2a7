"""A hub that is saved and restored decides as the one that kept running, and computes the same bits."""

import math
from collections import deque
from random import Random

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save

from edgeasync.core.arrays.buffers import POOLED_BYTES_MIN
from edgeasync.core.arrays.hub_model import HubModel, WaitingUpdate
from edgeasync.core.arrays.model_executor import ModelExecutor
from edgeasync.core.arrays.published_model import Publisher
from edgeasync.core.arrays.state_codec import decode_state, encode_state
from edgeasync.core.hub import divergence
from edgeasync.core.hub.effects import Assign, Discard, Fold, Keep, Publish, Restore, SendToDevice
from edgeasync.core.hub.events import (
    Evaluated,
    HubReceived,
    HubReceivedMalformed,
    HubStopRequested,
    PushArrived,
    Ticked,
)
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import (
    FLOAT32,
    CodecSettings,
    EvaluationSettings,
    HubCoreSettings,
    Limits,
    Liveness,
    StopCondition,
)
from edgeasync.core.recovery import state as durable
from edgeasync.errors import StorageError
from edgeasync.measurements.votes import Votes
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import (
    BufferedAggregator,
    ImmediateAggregator,
    ModelAverageAggregator,
    QuorumAggregator,
    SynchronousAggregator,
)
from edgeasync.policies.combining import CentredClipCombiner, MedianCombiner
from edgeasync.policies.frequency import AdaptiveFrequency
from edgeasync.policies.optimizers import SGD, Adam
from edgeasync.policies.policy import Plateau, Policy, WarmUp
from edgeasync.protocol.codecs import STAGES, VectorSource, make_codec
from edgeasync.protocol.messages import (
    DeviceProfile,
    Fetch,
    Goodbye,
    Hello,
    ModelVersion,
    Order,
    Ping,
    Push,
    Welcome,
)
from tests.support.simulation.whims import ROLLBACK, WARNING
from tests.support.size import repetitions

F = np.float32
LINEAGE = "00c0ffee00c0ffee"
DEVICES = ("a", "b", "c", "d", "e")
MOMENTUM = (SGD(learning_rate=0.5, momentum=0.9),)
CHAIN = CodecSettings(push="int8", model="float16", delta="sign", publish_s=0.5)
AUTO = CodecSettings()
ROUNDS = SynchronousAggregator()
QUORUM = QuorumAggregator(share=0.6)
BUFFERED = BufferedAggregator(count=3, wait_s_max=4.0)


def make_spec(trained=40):
    return ParameterSpec(
        (
            Parameter("layer.weights", (trained - 4,)),
            Parameter("layer.bias", (2, 2)),
            Parameter("mean", (3,), "statistic"),
        )
    )


# What differs in the state it keeps, and in when that changes.
POLICIES = {
    "immediate": ({"aggregate": ImmediateAggregator(), "optimizer": MOMENTUM}, CHAIN),
    "immediate, plain": ({"aggregate": ImmediateAggregator()}, FLOAT32),
    "immediate, centred": (
        {"aggregate": ImmediateAggregator(), "combine": CentredClipCombiner(), "optimizer": MOMENTUM},
        CHAIN,
    ),
    "immediate, goes back": (
        {"aggregate": ImmediateAggregator(), "monitor": ROLLBACK},
        CHAIN,
    ),
    "buffered": ({"aggregate": BUFFERED, "monitor": WARNING, "plateau": Plateau(patience=1)}, AUTO),
    "quorum": ({"aggregate": QUORUM, "optimizer": (Adam(),), "frequency": AdaptiveFrequency()}, CHAIN),
    "quorum, goes back": ({"aggregate": QUORUM, "monitor": ROLLBACK, "behind_max": 1.5}, CHAIN),
    "synchronous": ({"aggregate": ROUNDS, "combine": MedianCombiner(), "take": "better"}, FLOAT32),
    "synchronous, goes back": ({"aggregate": ROUNDS, "monitor": ROLLBACK}, AUTO),
    "model_average": (
        {"aggregate": ModelAverageAggregator(), "take": "best", "monitor": ROLLBACK, "optimizer": (SGD(),)},
        CodecSettings(push="float16", model="bfloat16", delta="off"),
    ),
    "warm-up": (
        {"aggregate": BUFFERED, "warm_up": WarmUp(epochs=1.0), "plateau": Plateau(patience=1)},
        CodecSettings(delta="top_k(0.1)"),
    ),
}

QUICK = {"immediate, goes back", "quorum"}
"""The policies that README's test command restores, too."""


class Hub:
    """A core, a model and what is published; effects are carried out at once, except what is said to devices."""

    def __init__(self, name, spec, now_s=0.0):
        parts, codec = POLICIES[name]
        self.spec = spec
        policy = Policy(**parts)
        self.core = HubCore(
            spec=spec,
            training={},
            policy=policy,
            settings=HubCoreSettings(
                codec=codec,
                liveness=Liveness(progress_s=20.0),
                limits=Limits(devices_max=4, strikes_max=3, quarantine_s=20.0, updates_held_max=6),
                stop=StopCondition(minutes=30.0),
                evaluation=EvaluationSettings(every="4 updates"),
            ),
            version=ModelVersion(LINEAGE, 0),
            make_session=self._make_session,
            now_s=now_s,
        )
        initial = np.random.default_rng(0).standard_normal(spec.length).astype(F)
        self.model = HubModel(spec, initial, 0, policy)
        self.publisher = Publisher(spec, self.model, codec)
        self.executor = ModelExecutor(self.model, self.publisher)
        self.sessions = 0
        self.sent = {}

    def _make_session(self):
        self.sessions += 1
        return self.sessions.to_bytes(16, "big")

    def again(self, name):
        """Return a hub that was started from what this one wrote to a file."""
        state = durable.capture(self.core, self.model, self.publisher, 0, 0.0)
        hub = Hub(name, self.spec, now_s=123.0)
        durable.restore(load(save(state.tensors)), hub.core, hub.model, hub.publisher)
        hub.sessions = self.sessions
        return hub

    def give(self, event, now_s):
        return self._do(self.core.handle(event, now_s), now_s)

    def push(self, peer, push, payload, now_s, *, capacity, norm=None):
        codec = make_codec(push.codec, self.spec)
        source = codec.open(payload)
        norm = self.model.norm(source) if norm is None else norm
        handle = self.model.keep(WaitingUpdate(source, push.codec, payload))
        return self.give(PushArrived(peer, push, handle, norm, capacity), now_s)

    def tick(self, now_s, *, capacity):
        return self._do(self.core.handle(Ticked(capacity), now_s), now_s)

    def offer(self, held, codec):
        offer = self.publisher.offer(held, codec)
        return msgspec.structs.replace(offer, payload=bytes(offer.payload))

    def _do(self, effects, now_s):
        done = list(effects)
        for effect in effects:
            match effect:
                case Fold() | Publish() | Keep() | Restore():
                    if (folded := self.executor.apply(effect)) is not None:
                        done += self.give(folded, now_s)
                case Discard():
                    self.model.release(effect.handle)
                case Assign():
                    done.append(self.offer(effect.base, effect.codec))
        self.core.check()
        return done


class Drive:
    """Devices that do what comes to a random mind, before one hub and all that were started from its state."""

    def __init__(self, name, seed, spec=None):
        self.random = Random(f"{name} {seed}")
        self.name = name
        self.spec = spec or make_spec()
        self.hubs = [Hub(name, self.spec)]
        self.now_s = 0.0
        self.sessions, self.peers, self.states, self.starts = {}, {}, {}, {}
        self.peer = 0
        self.seen = set()
        # A monitor that is alarmed on a whim tells it by the loss.
        alarming = (7.0, 11.0, 13.0) if "monitor" in POLICIES[name][0] else (9.0, 90.0, math.inf)
        self.losses = (1.0, 2.0, 3.0) * 5 + alarming

    @property
    def hub(self):
        return self.hubs[0]

    def all(self, do):
        """Let every hub do it; what comes of it must be the same."""
        first, *others = [do(hub) for hub in self.hubs]
        for other in others:
            assert plain(other) == plain(first)
        for effect in first:
            self.seen.add(type(effect).__name__)
            if isinstance(effect, SendToDevice) and isinstance(effect.message, Welcome):
                (device,) = [name for name, peer in self.peers.items() if peer == effect.peer]
                self.sessions[device] = effect.message.session
        return first

    def give(self, event):
        self.all(lambda hub: hub.give(event, self.now_s))

    def hello(self, device):
        random = self.random
        self.peer += random.random() < 0.8
        if device not in self.peers or random.random() < 0.8:
            self.peers[device] = b"%s %d" % (device.encode(), self.peer)
        self.starts[device] = self.starts.get(device, 0) + (random.random() < 0.7)
        if random.random() < 0.2:
            self.states[device], self.starts[device] = self.states.get(device, 0) + 1, 1
        state = device.encode() * 8 + self.states.get(device, 0).to_bytes(8, "big")
        profile = DeviceProfile(examples=random.choice((0, 200, 500)))
        codecs = random.choice((STAGES, STAGES, ("identity",)))
        hello = Hello(device, state, self.starts[device], profile=profile, codecs=codecs)
        self.give(HubReceived(self.peers[device], hello))

    def push(self, device):
        random, member = self.random, self.hub.core.members.members[device]
        seq = member.seq_last + random.choice((1,) * 12 + (0, 2))
        base = max(0, self.hub.core.version - random.choice((0, 0, 0, 1, 2, 5)))
        takes_models = self.hub.core.policy_engine.in_force.aggregate.update == "model"
        codec = random.choice(
            ("identity", "float16") if takes_models else ("identity", "int8", "top_k(0.1)", "sign")
        )
        values = np.random.default_rng(random.getrandbits(32)).standard_normal(self.spec.length).astype(F) * F(0.1)
        if takes_models:
            values += self.hub.model.current.vector
        payload = bytes(make_codec(codec, self.spec).encode(VectorSource(values)))
        push = Push(
            self.sessions[device], max(1, seq), ModelVersion(LINEAGE, base),
            random.randint(1, 9), random.randint(0, 64),
            random.choice(self.losses), random.random(), random.random(),
            codec, 0, len(payload), 0, random.choice((None, 0.5, 1.0, 3.0)),
        )  # fmt: skip
        capacity, norm = random.random() < 0.9, math.nan if random.random() < 0.04 else None
        self.all(lambda hub: hub.push(self.peers[device], push, payload, self.now_s, capacity=capacity, norm=norm))

    def step(self):  # noqa: C901 (a table, one row for each chance)
        random = self.random
        self.now_s += random.choice((0.0, 0.01, 0.3, 1.0))
        device = random.choice(DEVICES)
        peer, session = self.peers.get(device), self.sessions.get(device)
        member = self.hub.core.members.members.get(device)
        if member is None or member.session != session:
            session = None
        chance = random.random()
        if session is None or chance < 0.03:
            self.hello(device)
        elif chance < 0.7:
            self.push(device)
        elif chance < 0.75:
            self.give(HubReceived(peer, Ping(session, 1.0, random.randint(0, 3), random.random())))
        elif chance < 0.85:
            number = self.hub.core.publish_schedule.state.number - 1
            held = random.choice((None, ModelVersion(LINEAGE, max(0, number))))
            self.give(HubReceived(peer, Fetch(session, held), random.random() < 0.9))
        elif chance < 0.87:
            self.give(HubReceived(peer, Goodbye("stopping", session)))
        elif chance < 0.88:
            self.give(HubReceivedMalformed(peer, "nonsense"))
        elif chance < 0.89:
            self.give(HubReceived(b"operator", Order(device, random.choice(("quarantine", "release", "release")))))
        elif chance < 0.9:
            self.now_s += 16.0
        elif chance < 0.93:
            self.give(Evaluated(self.hub.core.version, random.choice((1.0, 2.0, math.nan)), random.random()))
        else:
            self.all(lambda hub: hub.tick(self.now_s, capacity=random.random() < 2.0))

    def go(self, steps):
        for _ in range(steps):
            self.step()

    def write(self):
        return durable.capture(self.hub.core, self.hub.model, self.hub.publisher, 0, 0.0)

    def restart(self):
        """Start a hub from the newest one's state; keep it beside the first."""
        self.hubs = [self.hub, self.hubs[-1].again(self.name)]

    def check(self):
        """What the hubs would write down, and what they hold, is the same."""
        first, *others = self.hubs
        written = durable.capture(first.core, first.model, first.publisher, 0, 0.0)
        for hub in others:
            state = durable.capture(hub.core, hub.model, hub.publisher, 0, 0.0)
            assert list(state.tensors) == list(written.tensors)
            for name, array in written.tensors.items():
                assert state.tensors[name].tobytes() == array.tobytes(), name
            assert walk(hub.core) == walk(first.core)
            codec, newest = first.core.settings.codec.model, first.core.version
            for held in (None, *range(max(0, newest - 20), newest + 1)):
                assert hub.offer(held, codec) == first.offer(held, codec)


def plain(effects):
    """Effects as text, but for what a device says again when it greets a hub that was restarted.

    Of a codec chosen for a link, which is measured again, only that there is one.
    """

    def blur(effect):
        if isinstance(effect, Assign):
            return msgspec.structs.replace(effect, push_codec=effect.push_codec and "any", coarse=False)
        if isinstance(effect, SendToDevice) and isinstance(effect.message, Welcome):
            return msgspec.structs.replace(effect.message, push_codec="any")
        return effect

    return [repr(blur(effect)) for effect in effects]


UNORDERED = {"_by_session", "_by_peer", "_by_key", "_leases", "voters", "shared", "waiters"}
"""Tables that are only looked up in, or sorted before they are walked."""

EXCLUDED = {"link", "codec_push", "coarse", "_strangers", "_make_session"}
EXCLUDED |= {"changes", "generation", "notes", "_refused"}  # only for those who look
EXCLUDED |= {"messages_accepted", "messages_refused", "messages_ignored"}
EXCLUDED |= {"_kept", "_peak"}
EXCLUDED |= {"_ballots"}  # which are counted when somebody asks; `Waiting.check` compares them
FOLLOWS = ("ordered", "median", "peak")
"""What follows from votes is made when somebody asks for it."""


def walk(value, known=None):
    """Return all that is in an object, by the names of its attributes, but for what is not durable on purpose.

    Many parts hold the same state; `known` has what was walked already.
    """
    known = {} if known is None else known
    if isinstance(value, str | bytes | int | float | None):
        return repr(value)
    if isinstance(value, dict):
        return [(walk(key, known), walk(item, known)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(walk(item, known) for item in value)
    if isinstance(value, list | tuple | deque):
        return [type(value), getattr(value, "maxlen", None), *[walk(item, known) for item in value]]
    if id(value) in known:
        return known[id(value)][1]
    names = [*getattr(value, "__struct_fields__", ()), *getattr(value, "__dict__", ())]
    if isinstance(value, Votes):
        names += [name for name in FOLLOWS if hasattr(value, name)]
    parts = {name: walk(getattr(value, name), known) for name in names if name not in EXCLUDED}
    found = [type(value), *[(name, sorted(part) if name in UNORDERED else part) for name, part in parts.items()]]
    known[id(value)] = value, found  # the value, too: another may get the number of one that is gone
    return found


@pytest.fixture(autouse=True)
def _versions_are_kept_often(monkeypatch):
    monkeypatch.setattr(divergence, "KEEP_EVERY_UPDATES", 4)


@pytest.mark.parametrize("seed", range(repetitions("hubs that are put back")))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gate] * (name not in QUICK)) for name in POLICIES]
)
def test_a_hub_that_is_put_back_decides_and_computes_the_same(name, seed):
    drive = Drive(name, seed)
    expected = {"Fold", "Assign", "Discard", *(("Keep", "Restore") if "goes back" in name else ())}
    rounds = 0
    while rounds < 20 or not expected <= drive.seen:
        rounds += 1
        drive.go(drive.random.randint(1, 30))
        drive.check()
        drive.restart()
        drive.check()
    drive.give(HubStopRequested())
    drive.check()
    assert drive.hub.core.stopped


def test_large_vectors_and_payloads_are_counted_as_before():
    drive = Drive("immediate, goes back", 0, make_spec(POOLED_BYTES_MIN))
    for _ in range(4):
        drive.go(20)
        drive.restart()
        drive.check()
        drive.go(20)
        first, second = drive.hubs
        assert first.model.snapshots_alive == second.model.snapshots_alive
        assert first.publisher.outdated_alive == second.publisher.outdated_alive
        drive.check()


# -- nothing is forgotten ------------------------------------------------------------------------------------


def test_what_is_measured_of_connections_begins_anew():
    drive = Drive("buffered", 1)
    drive.go(60)
    drive.hub.core.messages_refused = 5
    drive.restart()
    core = drive.hubs[1].core
    assert core.messages_refused == 0
    assert not core.messages_accepted
    for member in core.members.members.values():
        assert (member.link.round_trip_s, member.link.bandwidth_bytes_per_s) == (0.0, 0.0)


# -- arrays --------------------------------------------------------------------------------------------------


def test_arrays_have_names_that_people_understand_and_each_vector_is_there_once():
    drive = Drive("immediate, goes back", 0)
    kinds = {"layer.weights", "layer.bias", "mean", "optimizer", "kept", "published", "chain"}
    while not kinds <= {name.partition("/")[0] for name in drive.write().tensors}:
        drive.step()
    state, hub = drive.write(), drive.hub
    places = [array.__array_interface__["data"][0] for array in state.tensors.values()]
    assert len(set(places)) == len(places)
    assert {str(array.dtype) for array in state.tensors.values()} == {"float32", "uint8"}
    assert state.tensors["layer.bias"].shape == (2, 2)
    assert np.shares_memory(state.tensors["layer.weights"], hub.model.current.vector)
    assert not any(np.shares_memory(state.tensors["optimizer/0"], vector) for vector in hub.model._state)


def test_a_new_model_is_there_once():
    hub = Hub("immediate, goes back", make_spec())
    state = durable.capture(hub.core, hub.model, hub.publisher, 0, 0.0)
    assert set(state.tensors) == {"layer.weights", "layer.bias", "mean", "optimizer/0", "published", "scalars"}


def test_a_parameter_may_have_the_name_of_another_array():
    spec = ParameterSpec(
        (Parameter("published", (2,)), Parameter("hub/optimizer/0", (40,)), Parameter("update/0", (1,)))
    )
    drive = Drive("immediate", 0, spec)
    drive.go(60)
    drive.restart()
    drive.go(60)
    drive.check()


def test_updates_that_stood_in_line_are_not_written_down_and_those_that_wait_are():
    drive = Drive("synchronous", 0)
    while not drive.hub.core.policy_engine.gathering.count:
        drive.step()
    hub = drive.hub
    handles = [one.handle for one in hub.core.policy_engine.state.gathering.contributions]
    note = durable.note(hub.core, hub.model, 0, 0.0)
    for handle in handles:
        hub.model.release(handle)  # as a later fold does, before the arrays are taken
    state = durable.complete(note, hub.model, hub.publisher)
    other = Hub("synchronous", drive.spec)
    durable.restore(state.tensors, other.core, other.model, other.publisher)
    assert [one.handle for one in other.core.policy_engine.state.gathering.contributions] == handles
    assert other.model.updates_waiting == len(handles)
    next_handle = other.model.keep(WaitingUpdate(VectorSource(np.zeros(3, F)), "identity", b""))
    assert (
        next_handle == hub.model.keep(WaitingUpdate(VectorSource(np.zeros(3, F)), "identity", b"")) > max(handles)
    )


# -- damage --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written():
    drive = Drive("immediate, goes back", 0)
    drive.go(120)
    return drive.write().tensors


def put_back(tensors, name="immediate, goes back", spec=None):
    hub = Hub(name, spec or make_spec())
    durable.restore(tensors, hub.core, hub.model, hub.publisher)


def with_scalars(tensors, scalars):
    return tensors | {durable.SCALARS: np.frombuffer(scalars, np.uint8)}


def test_damaged_bytes_are_refused(written):
    random, scalars = Random(1), written[durable.SCALARS].tobytes()
    with pytest.raises(StorageError, match="'scalars' is missing"):
        put_back({name: array for name, array in written.items() if name != durable.SCALARS})
    for length in [*range(14), len(scalars) // 2, len(scalars) - 1]:
        with pytest.raises(StorageError):
            put_back(with_scalars(written, scalars[:length]))
    for _ in range(200):
        damaged = bytearray(scalars)
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        with pytest.raises(StorageError):
            put_back(with_scalars(written, bytes(damaged)))


class Other(msgspec.Struct):
    core: int = 3


def test_sound_bytes_of_another_kind_are_refused(written):
    for body in (encode_state(Other()), encode_state(make_spec())):
        with pytest.raises(StorageError, match="not a hub's state"):
            put_back(with_scalars(written, body))
    hub = Hub("immediate", make_spec())
    with pytest.raises(StorageError, match="not a hub's state"):
        durable.load_state(hub.core, written[durable.SCALARS].tobytes())


@pytest.mark.parametrize("name", ["optimizer/0", "published", "layer.bias"])
def test_an_array_that_is_missing_or_not_as_it_was_is_refused(written, name):
    others = {key: array for key, array in written.items() if key != name}
    for arrays in (others, others | {name: np.zeros(3, F)}, others | {name: np.zeros(3, np.uint8)}):
        with pytest.raises(StorageError, match=name):
            put_back(arrays)


def test_a_payload_that_is_missing_or_broken_is_refused():
    drive = Drive("synchronous", 0)
    while not drive.hub.core.policy_engine.gathering.count:
        drive.step()
    state, hub = drive.write(), drive.hub
    name = f"update/{hub.core.policy_engine.state.gathering.contributions[0].handle}"
    for array in (np.zeros(1, np.uint8), np.zeros(4, F)):
        with pytest.raises(StorageError, match=name.replace("/", ".")):
            put_back(state.tensors | {name: array}, "synchronous")


def test_the_state_of_another_model_or_policy_is_refused(written):
    with pytest.raises(StorageError, match="another model"):
        put_back(written, spec=make_spec(41))
    with pytest.raises(StorageError, match="another policy"):
        put_back(written, "immediate, centred")
    hub = Hub("immediate, plain", make_spec())
    with pytest.raises(StorageError, match="codec"):
        hub.publisher.load_state(
            decode_state(written[durable.SCALARS].tobytes(), durable._Scalars).publisher, written
        )
