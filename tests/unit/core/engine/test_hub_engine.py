"""The hub's exchange by itself: frames in, frames out, with a shell that only takes notes."""

import math

import msgspec
import numpy as np
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.arrays.hub_model import Model, Snapshot
from edgeasync.core.engine.fold_queue import INLINE_BYTES_MAX
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.core.engine.hub_transfers import SUSPENDED_S
from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.effects import Restore
from edgeasync.core.hub.events import Heard, StopRequested, Ticked
from edgeasync.core.hub.machine import UNCOUNTED_BYTES_MAX, HubCore
from edgeasync.core.hub.settings import FLOAT32, CodecSettings, HubCoreSettings, Limits, Liveness
from edgeasync.core.recovery.replay import Sessions
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator, ModelAverageAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import STAGES, VectorSource, make_codec
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Credit,
    Fetch,
    FetchGraph,
    Graph,
    Hello,
    Leave,
    ModelVersion,
    Piece,
    Ping,
    Push,
    Refuse,
    StatusRequest,
    Welcome,
)
from tests.support.versions import in_version

SPEC = ParameterSpec((Parameter("w", (50_000,)),))
PIECE = 65_536
LINEAGE = "0" * 16
POLICY = Policy(
    aggregate=ImmediateAggregator(),
    optimizer=(SGD(),),
    frequency=FixedFrequency(),
    monitor=Monitor(watch=()),
)


class Notes:
    """A shell that keeps what it is asked to send."""

    def __init__(self):
        self.sent = []
        self.payloads = []

    def send(self, peer, header, payload):
        self.sent.append((peer, wire.decode(header)))
        self.payloads.append(payload)

    def report(self, report):
        pass

    def describe(self):
        return {}

    def save(self, snapshot, *, last):
        pass

    def run_in_background(self, work, then):
        then(work())


class Bench:
    def __init__(self, graph=None, codec=FLOAT32, policy=POLICY, spec=SPEC, **limits):
        self.notes = Notes()
        numbers = iter(range(1, 100))
        sessions = Sessions(lambda: next(numbers).to_bytes(16, "big"))
        core = HubCore(
            spec=spec,
            training={},
            policy=policy,
            settings=HubCoreSettings(
                codec=codec,
                liveness=Liveness(heartbeat_s=1.0, lease_s=5.0),
                limits=Limits(**{"piece_bytes": ByteCount(PIECE)} | limits),
            ),
            version=ModelVersion(LINEAGE, 0),
            graph=graph,
            make_session=sessions,
            now_s=0.0,
        )
        model = Model(spec, np.zeros(spec.length, np.float32), 0, policy)
        self.engine = HubEngine(core, model, self.notes, sessions=sessions)
        self.sessions = {}

    def say(self, peer, message, payload=None, at_s=0.0):
        self.engine.on_message(peer, wire.encode(message), payload, at_s)
        return [message for to, message in self.notes.sent if to == peer][-1]

    def join(self, name):
        welcome = self.say(name, Hello(name.decode(), name.ljust(16, b"-"), 1, codecs=STAGES))
        assert isinstance(welcome, Welcome)
        self.sessions[name] = welcome.session

    def announce(self, name, at_s=0.0, nbytes=SPEC.nbytes):
        payload = bytes(nbytes)
        push = Push(
            self.sessions[name], 1, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, "identity",
            wire.checksum(payload), len(payload), transfer=1,
        )  # fmt: skip
        return self.say(name, push, at_s=at_s)


def test_a_stalled_transfer_gives_its_place_to_the_next():
    bench = Bench(updates_held_max=1)
    bench.join(b"idler")
    bench.join(b"worker")
    assert bench.announce(b"idler") == Credit(1, 0)
    assert bench.announce(b"worker", at_s=1.0).code == "busy"
    for at_s in (2.0, 4.0):
        bench.say(b"idler", Ping(bench.sessions[b"idler"], at_s, 0), at_s=at_s)
    assert bench.announce(b"worker", at_s=4.5).code == "busy"
    assert bench.announce(b"worker", at_s=5.5) == Credit(1, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("transfer", [0, 1])
def test_a_metric_that_is_no_number_is_refused_and_does_not_count(bad, transfer):
    bench = Bench()
    bench.join(b"pi")
    payload = bytes(SPEC.nbytes)
    push = Push(
        bench.sessions[b"pi"], 1, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, "identity",
        wire.checksum(payload), len(payload), transfer, metrics={"f1": 0.5, "mae": bad},
    )  # fmt: skip
    answer = bench.say(b"pi", push, None if transfer else payload)
    assert (type(answer), answer.code, answer.sentence) == (Refuse, "malformed", "a metric is not finite")
    assert bench.engine.core.updates_applied == 0


def test_models_that_nobody_takes_in_make_way():
    bench = Bench(snapshots_max=3)
    for name in (b"first", b"second", b"third"):
        bench.join(name)
    payload = bytes(SPEC.nbytes)
    versions = []
    for number, name in enumerate((b"first", b"second")):
        assignment = bench.say(name, Fetch(bench.sessions[name]))
        versions.append(assignment.version.number)
        push = Push(
            bench.sessions[b"third"], number + 1, ModelVersion(LINEAGE, number), 1, 1, 0.0, 0.0, 0.1, "float16",
            wire.checksum(payload[::2]), len(payload) // 2, transfer=number + 1,
        )  # fmt: skip
        bench.say(b"third", push)
        for offset in range(0, len(payload) // 2, PIECE):
            part = payload[: min(PIECE, len(payload) // 2 - offset)]
            bench.say(b"third", Piece(number + 1, offset, wire.checksum(part)), part)
    assert versions == [0, 1]
    fetch = Fetch(bench.sessions[b"third"])
    assert bench.say(b"third", fetch, at_s=1.0).code == "busy"
    assert bench.say(b"third", fetch, at_s=6.0).version.number == 2


CODED = {
    "float16": CodecSettings(push="identity", model="float16", delta="off"),
    "float16, chain": CodecSettings(push="identity", delta="float16", publish_s=1e-6),
    "float32, chain": CodecSettings(push="identity", model="identity", delta="float16", publish_s=1e-6),
}


@pytest.mark.parametrize("codec", CODED.values(), ids=CODED)
def test_coded_models_that_nobody_takes_in_are_bounded_too(codec):
    bench = Bench(codec=codec, snapshots_max=4)
    bench.join(b"pusher")
    payload = np.full(SPEC.length, 0.5, np.float32).tobytes()
    busy = 0
    for number in range(20):
        name = b"idler-%d" % number
        bench.join(name)
        assignment = bench.say(name, Fetch(bench.sessions[name]), at_s=0.01 * number)
        if isinstance(assignment, Refuse):
            assert assignment.code == "busy"
            busy += 1
        else:
            assert assignment.transfer
        push = Push(
            bench.sessions[b"pusher"], number + 1, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, "identity",
            wire.checksum(payload), len(payload), transfer=number + 1,
        )  # fmt: skip
        bench.say(b"pusher", push, at_s=0.01 * number)
        for offset in range(0, len(payload), PIECE):
            part = payload[offset : offset + PIECE]
            bench.say(b"pusher", Piece(number + 1, offset, wire.checksum(part)), part, at_s=0.01 * number)
        bench.notes.payloads.clear()
    assert bench.engine.core.version == 20
    assert busy >= 15
    assert bench.engine._capacity._snapshots_held() <= 5
    bench.join(b"late")
    late = Fetch(bench.sessions[b"late"])
    assert bench.say(b"late", late, at_s=60.0).version.number == bench.engine.core.publish_schedule.state.number


@pytest.mark.parametrize("codec", [FLOAT32, *CODED.values()], ids=["float32", *CODED])
def test_two_snapshots_are_enough_to_be_given_one(codec):
    bench = Bench(codec=codec, snapshots_max=2)
    bench.join(b"pi")
    assert isinstance(bench.say(b"pi", Fetch(bench.sessions[b"pi"])), Assignment)


def test_a_transfer_that_moves_keeps_its_place():
    bench = Bench(updates_held_max=1)
    bench.join(b"slow")
    bench.join(b"worker")
    bench.announce(b"slow")
    part = bytes(PIECE)
    assert bench.say(b"slow", Piece(1, 0, wire.checksum(part)), part, at_s=4.0) == Credit(1, PIECE)
    answer = bench.announce(b"worker", at_s=6.0)
    assert isinstance(answer, Refuse)
    assert answer.code == "busy"
    assert bench.say(b"slow", Piece(1, PIECE, wire.checksum(part)), part, at_s=7.0) == Credit(1, 2 * PIECE)


def observed(bench):
    """Return the list to which the times of the events of pieces and credits are added."""
    times = []

    def observe(event, effects, now_s):
        if isinstance(event, Heard):
            times.append(now_s)

    bench.engine._observe = observe
    return times


def test_a_piece_makes_an_event_only_some_time_after_the_lease_was_renewed():
    """All of them are counted, with their bytes."""
    bench = Bench()
    bench.join(b"pi")
    bench.announce(b"pi")
    times, member, part = observed(bench), bench.engine.core.members.members["pi"], bytes(PIECE)
    for number, at_s, events in [(0, 0.6, []), (1, 0.7, [0.7]), (2, 1.0, [0.7])]:
        piece = Piece(1, number * PIECE, wire.checksum(part))
        assert bench.say(b"pi", piece, part, at_s=at_s) == Credit(1, (number + 1) * PIECE)
        assert times == events
    assert bench.engine.core.messages_accepted["piece"] == 3
    assert member.traffic.up_bytes > 2 * PIECE
    assert PIECE < member.link.uncounted[0] < 2 * PIECE
    bench.engine.tick(5.6)
    assert member.live
    bench.engine.tick(5.7)
    assert member.state == "lost"


def test_a_credit_makes_an_event_only_some_time_after_the_lease_was_renewed():
    bench = Bench()
    bench.join(b"pi")
    bench.say(b"pi", Fetch(bench.sessions[b"pi"]))
    times = observed(bench)
    bench.say(b"pi", Credit(1, 0), at_s=0.1)
    bench.say(b"pi", Credit(1, PIECE), at_s=0.7)
    bench.say(b"pi", Credit(1, 2 * PIECE), at_s=0.8)
    assert times == [0.7]
    assert bench.engine.core.messages_accepted["credit"] == 3


def test_a_hub_that_stands_still_sends_pieces_and_accepts_no_credit():
    bench = Bench()
    bench.join(b"pi")
    bench.say(b"pi", Fetch(bench.sessions[b"pi"]))
    bench.engine.on_failing("the disk is full")
    assert isinstance(bench.say(b"pi", Credit(1, 0), at_s=0.1), Piece)
    assert "credit" not in bench.engine.core.messages_accepted


def test_bytes_that_the_core_has_yet_to_count_are_bounded():
    spec = ParameterSpec((Parameter("w", (UNCOUNTED_BYTES_MAX // 2,)),))
    bench = Bench(spec=spec, piece_bytes=ByteCount(1 << 20))
    bench.join(b"pi")
    bench.announce(b"pi", nbytes=spec.nbytes)
    member, part = bench.engine.core.members.members["pi"], bytes(1 << 20)
    for offset in range(0, spec.nbytes - len(part), len(part)):
        assert isinstance(bench.say(b"pi", Piece(1, offset, wire.checksum(part)), part), Credit)
        assert sum(member.link.uncounted) < UNCOUNTED_BYTES_MAX
    assert member.traffic.up_bytes >= UNCOUNTED_BYTES_MAX


@pytest.mark.parametrize("end", ["lost", "stopped"])
def test_a_piece_after_the_end_is_for_the_core_to_answer(end):
    bench = Bench()
    bench.join(b"pi")
    core, member = bench.engine.core, bench.engine.core.members.members["pi"]
    assert core.accept_silently(member, "piece", 0.1)
    core.handle(Ticked() if end == "lost" else StopRequested(), 5.0)
    member.seen_s = 5.0
    assert not core.accept_silently(member, "piece", 5.0)


@pytest.mark.parametrize("codec", ["identity", "float16"])
@pytest.mark.parametrize("largest", [1.0, 1e6])
def test_the_worker_codes_a_large_model_and_the_loop_only_sends_it(codec, largest):
    """Also a model with values too large for its codec, which is sent in float32."""
    spec = ParameterSpec((Parameter("w", (INLINE_BYTES_MAX // 4 + 1,)),))
    bench = Bench(spec=spec, codec=CodecSettings(push="identity", model=codec, delta="off"))
    working, coded, encode = [False], [], Snapshot.payload

    def run_in_background(work, then):
        working[0] = True
        result = work()
        working[0] = False
        then(result)

    def payload(snapshot, codec):
        if codec.name not in snapshot._payloads and snapshot.number:
            coded.append(working[0])
        return encode(snapshot, codec)

    bench.notes.run_in_background = run_in_background
    bench.join(b"pi")
    values = np.full(spec.length, largest, np.float32).tobytes()
    push = Push(
        bench.sessions[b"pi"], 1, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, "identity",
        wire.checksum(values), len(values),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "payload", payload)
        assert isinstance(bench.say(b"pi", push, values), Assignment)
    assert coded
    assert all(coded)


def test_a_revoked_key_keeps_nothing_of_its_transfers():
    """A push in pieces, one that was cut off, and a model on its way out: all gone, and their room is free."""
    bench, key = Bench(updates_held_max=1), b"k" * 32
    sender = Sender(key, "pi", "device")

    def say(message, payload=None, at_s=0.0):
        bench.engine.on_message(b"pi", wire.encode(message), payload, at_s, sender)
        return bench.notes.sent[-1][1]

    bench.join(b"worker")
    bench.sessions[b"pi"] = say(Hello("pi", b"p" * 16, 1, codecs=STAGES)).session
    say(Fetch(bench.sessions[b"pi"]))
    payload = bytes(SPEC.nbytes)
    push = Push(
        bench.sessions[b"pi"], 1, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, "identity",
        wire.checksum(payload), len(payload), transfer=1,
    )  # fmt: skip
    assert say(push) == Credit(1, 0)
    part = payload[:PIECE]
    assert say(Piece(1, 0, wire.checksum(part)), part) == Credit(1, PIECE)
    assert bench.announce(b"worker").code == "busy"
    bench.engine.revoke(key, 1.0)
    assert len(bench.engine._incoming) == 0
    assert not bench.engine._outgoing._active
    assert not bench.engine._outgoing._suspended
    assert bench.announce(b"worker", at_s=1.0) == Credit(1, 0)
    assert say(push, at_s=1.0).code == "unknown_session"


def test_a_routing_id_of_another_keys_device_gets_nobody_anywhere():
    """Messages under another key on a device's routing id: no answer, no strike, and its transfer continues."""
    bench, owner, thief = Bench(), Sender(b"o" * 32, "pi", "device"), Sender(b"t" * 32, "x", "device")
    bench.engine.on_message(b"pi", wire.encode(Hello("pi", b"p" * 16, 1)), None, 0.0, owner)
    answers = len(bench.notes.sent)
    for frame in (b"no message", wire.encode(Hello("x", b"x" * 16, 1)), wire.encode(Piece(1, 0, 0))):
        for _ in range(30):
            bench.engine.on_message(b"pi", frame, b"", 0.0, thief)
    member = bench.engine.core.members.members["pi"]
    assert (member.strikes, member.state, member.peer) == (0, "joining", b"pi")
    assert len(bench.notes.sent) == answers
    assert bench.engine.core.messages_refused == 90


GRAPH = ShippedGraph(bytes(range(256)) * 1000)


def fetch_graph(bench, name, at_s=0.0):
    return bench.say(name, FetchGraph(bench.sessions[name]), at_s=at_s)


def test_a_small_graph_goes_out_in_one_message():
    graph = ShippedGraph(b"a graph")
    bench = Bench(graph)
    bench.join(b"pi")
    assert fetch_graph(bench, b"pi") == Graph(graph.fingerprint, graph.checksum, 7)
    assert bench.notes.payloads[-1] is graph.payload


def test_a_graph_goes_out_in_pieces_of_the_one_object():
    bench = Bench(GRAPH)
    bench.join(b"pi")
    announced = fetch_graph(bench, b"pi")
    assert announced == Graph(GRAPH.fingerprint, GRAPH.checksum, len(GRAPH.payload), 1)
    assert bench.notes.payloads[-1] is None
    received = b""
    while len(received) < len(GRAPH.payload):
        sent = len(bench.notes.sent)
        bench.say(b"pi", Credit(1, len(received)))
        for part in bench.notes.payloads[sent:]:
            assert part.obj is GRAPH.payload
            received += part
    assert received == GRAPH.payload
    bench.say(b"pi", Credit(1, len(received)))
    assert bench.engine._outgoing.graphs == 0


def test_a_graph_is_sent_to_so_many_at_once_and_whoever_stalls_makes_way():
    bench = Bench(GRAPH, snapshots_max=2)
    for name in (b"a", b"b", b"c"):
        bench.join(name)
    assert isinstance(fetch_graph(bench, b"a"), Graph)
    assert isinstance(fetch_graph(bench, b"b"), Graph)
    assert isinstance(fetch_graph(bench, b"b"), Graph), "its own place, again"
    assert fetch_graph(bench, b"c", at_s=1.0).code == "busy"
    bench.say(b"b", Credit(3, 0), at_s=4.0)
    assert fetch_graph(bench, b"c", at_s=4.5).code == "busy"
    assert isinstance(fetch_graph(bench, b"c", at_s=5.5), Graph)
    assert bench.engine._outgoing.graphs == 2
    for name in (b"b", b"c"):
        bench.engine.on_message(name, wire.encode(Leave("stopping", bench.sessions[name])), None, 6.0)
    assert bench.engine._outgoing.graphs == 0


# -- transfers that resume -----------------------------------------------------------------------------------

WHOLE = np.arange(SPEC.length, dtype=np.float32).tobytes()


def push_of(bench, name, *, seq=1, payload=WHOLE, transfer=1, codec="identity"):
    return Push(
        bench.sessions[name], seq, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, codec,
        wire.checksum(payload), len(payload), transfer=transfer,
    )  # fmt: skip


def piece_of(offset, *, transfer=1, payload=WHOLE):
    part = payload[offset : offset + PIECE]
    return Piece(transfer, offset, wire.checksum(part)), part


def reconnect(bench, name, number, at_s=0.0):
    """Say hello on another connection, as the same start of the same device; return its name."""
    peer = name + b"#%d" % number
    hello = Hello(name.decode(), name.ljust(16, b"-"), 1, session=bench.sessions[name])
    welcome = bench.say(peer, hello, at_s=at_s)
    assert isinstance(welcome, Welcome)
    bench.sessions[name] = bench.sessions[peer] = welcome.session
    return peer


def cut_in_mid_push(bench, name=b"pi", *, pieces=2, at_s=0.0):
    """Join, push some pieces, and come back on another connection; return that."""
    bench.join(name)
    assert bench.say(name, push_of(bench, name)) == Credit(1, 0)
    for number in range(pieces):
        bench.say(name, *piece_of(number * PIECE))
    return reconnect(bench, name, 2, at_s)


def test_a_push_goes_on_over_another_connection():
    bench = Bench()
    peer = cut_in_mid_push(bench)
    assert bench.say(peer, push_of(bench, b"pi", transfer=2)) == Credit(2, 2 * PIECE)
    bench.say(peer, *piece_of(2 * PIECE, transfer=2))
    bench.say(peer, *piece_of(3 * PIECE, transfer=2))
    assert bench.engine.core.updates_applied == 1
    np.testing.assert_array_equal(bench.engine.model.current.vector, np.frombuffer(WHOLE, np.float32))
    assert bench.engine.core.messages_refused == 0


def test_a_push_goes_on_over_the_same_connection():
    bench = Bench()
    bench.join(b"pi")
    bench.say(b"pi", push_of(bench, b"pi"))
    bench.say(b"pi", *piece_of(0))
    assert bench.say(b"pi", push_of(bench, b"pi", transfer=2)) == Credit(2, PIECE)


@pytest.mark.parametrize(
    "other",
    [
        {"payload": WHOLE[4:] + WHOLE[:4]},
        {"payload": WHOLE[: len(WHOLE) // 2], "codec": "float16"},
    ],
    ids=["other values", "another codec"],
)
def test_another_payload_under_the_same_seq_starts_anew(other):
    bench = Bench()
    peer = cut_in_mid_push(bench)
    assert bench.say(peer, push_of(bench, b"pi", transfer=2, **other)) == Credit(2, 0)
    assert len(bench.engine._incoming) == 1


def test_a_forged_beginning_is_found_out_in_the_end():
    """The same checksum is announced, but what came before the cut was not of that payload."""
    bench = Bench()
    bench.join(b"pi")
    forged = bytes(len(WHOLE))
    bench.say(b"pi", push_of(bench, b"pi"))
    bench.say(b"pi", *piece_of(0, payload=forged))
    peer = reconnect(bench, b"pi", 2)
    assert bench.say(peer, push_of(bench, b"pi", transfer=2)) == Credit(2, PIECE)
    for number in (1, 2, 3):
        answer = bench.say(peer, *piece_of(number * PIECE, transfer=2))
    assert answer.code == "malformed"
    assert bench.engine.core.updates_applied == 0
    assert bench.say(peer, push_of(bench, b"pi", transfer=3)) == Credit(3, 0)


def test_what_was_spoilt_starts_anew():
    bench = Bench()
    bench.join(b"pi")
    bench.say(b"pi", push_of(bench, b"pi"))
    bench.say(b"pi", *piece_of(0))
    piece, _ = piece_of(PIECE)
    assert bench.say(b"pi", piece, bytes(PIECE)).code == "malformed"
    assert bench.say(b"pi", push_of(bench, b"pi", transfer=2)) == Credit(2, 0)


def test_nobody_goes_on_with_what_another_has_begun():
    bench = Bench()
    cut_in_mid_push(bench)
    bench.join(b"other")
    assert bench.say(b"other", push_of(bench, b"other")) == Credit(1, 0)


def test_what_was_cut_off_counts_as_held_and_gives_way_first():
    bench = Bench(updates_held_max=2)
    cut_in_mid_push(bench, b"a", at_s=0.0)
    peer = cut_in_mid_push(bench, b"b", at_s=1.0)
    assert len(bench.engine._incoming) == 2
    bench.join(b"c")
    assert bench.say(b"c", push_of(bench, b"c"), at_s=1.0) == Credit(1, 0)
    assert len(bench.engine._incoming) == 2, "the one of a made way"
    assert bench.say(peer, push_of(bench, b"b", transfer=2), at_s=1.0) == Credit(2, 2 * PIECE)
    again = reconnect(bench, b"a", 3, at_s=1.0)
    assert bench.say(again, push_of(bench, b"a", transfer=2), at_s=1.0).code == "busy"


def test_what_was_cut_off_is_its_devices_own_place():
    bench = Bench(updates_held_max=1)
    peer = cut_in_mid_push(bench)
    assert bench.say(peer, push_of(bench, b"pi", transfer=2)) == Credit(2, 2 * PIECE)


def test_what_was_cut_off_is_dropped_when_the_device_pushes_something_else():
    bench = Bench()
    peer = cut_in_mid_push(bench)
    small = bytes(PIECE)
    bench.say(peer, push_of(bench, b"pi", payload=small), small)  # malformed: not a vector of the spec
    assert len(bench.engine._incoming) == 1
    assert bench.say(peer, push_of(bench, b"pi", transfer=2, codec="float16", payload=WHOLE[::2])) == Credit(2, 0)
    assert len(bench.engine._incoming) == 1


def test_what_was_cut_off_is_not_kept_for_ever():
    bench = Bench()
    peer = cut_in_mid_push(bench)
    bench.engine.tick(SUSPENDED_S - 1.0)
    assert len(bench.engine._incoming) == 1
    bench.engine.tick(SUSPENDED_S + 1.0)
    assert len(bench.engine._incoming) == 0
    assert bench.say(peer, push_of(bench, b"pi", transfer=2), at_s=SUSPENDED_S + 1.0) == Credit(2, 0)


def fold_one(bench, name=b"mover", seq=1):
    """Let another device move the model on."""
    if name not in bench.sessions:
        bench.join(name)
    bench.say(name, push_of(bench, name, seq=seq, transfer=seq))
    for offset in range(0, len(WHOLE), PIECE):
        bench.say(name, *piece_of(offset, transfer=seq))


def cut_in_mid_assignment(bench, *, begun=True):
    """Fetch, receive a piece, and come back on another connection; return that and the assignment."""
    bench.join(b"pi")
    assignment = bench.say(b"pi", Fetch(bench.sessions[b"pi"]))
    if begun:
        bench.say(b"pi", Credit(assignment.transfer, 0))
    return reconnect(bench, b"pi", 2), assignment


def test_an_assignment_goes_on_though_the_model_has_moved():
    bench = Bench()
    peer, first = cut_in_mid_assignment(bench)
    fold_one(bench)
    again = bench.say(peer, Fetch(bench.sessions[b"pi"], partial=first.checksum))
    assert (again.version, again.checksum) == (first.version, first.checksum)
    assert again.version.number == 0 < bench.engine.core.version
    assert again.transfer != first.transfer
    piece = bench.say(peer, Credit(again.transfer, PIECE))
    assert (piece.transfer, piece.offset) == (again.transfer, 3 * PIECE), "the last of those that the window takes"
    assert bench.notes.payloads[-1] == bytes(SPEC.nbytes)[3 * PIECE :]


@pytest.mark.parametrize("partial", [None, 0, 12345, 2**64 - 1])
def test_who_holds_nothing_of_it_is_sent_the_newest(partial):
    bench = Bench()
    peer, first = cut_in_mid_assignment(bench)
    fold_one(bench)
    again = bench.say(peer, Fetch(bench.sessions[b"pi"], partial=partial))
    assert again.version.number == 1
    assert again.checksum != first.checksum
    late = bench.say(peer, Fetch(bench.sessions[b"pi"], partial=first.checksum))
    assert late.version.number == 1, "what was kept has been dropped for it"


def test_another_device_is_not_sent_what_was_cut_off():
    bench = Bench()
    _, first = cut_in_mid_assignment(bench)
    fold_one(bench)
    bench.join(b"other")
    assert bench.say(b"other", Fetch(bench.sessions[b"other"], partial=first.checksum)).version.number == 1


def test_strangers_leave_nothing_behind():
    bench = Bench()
    for number in range(20):
        bench.say(b"stranger %d" % number, Fetch(bytes(16), partial=number))
    assert not bench.engine._outgoing._partials


def test_the_same_payload_goes_on_though_nothing_was_kept():
    bench = Bench()
    peer, first = cut_in_mid_assignment(bench)
    bench.engine.tick(SUSPENDED_S + 1.0)
    again = bench.say(peer, Fetch(bench.sessions[b"pi"], partial=first.checksum), at_s=SUSPENDED_S + 1.0)
    assert again.checksum == first.checksum
    assert bench.say(peer, Credit(again.transfer, 3 * PIECE), at_s=SUSPENDED_S + 1.0).offset == 3 * PIECE


def test_assignments_that_were_cut_off_make_way_for_newer_models():
    bench = Bench(snapshots_max=2)
    peer, first = cut_in_mid_assignment(bench)
    fold_one(bench)
    assert bench.engine.model.snapshots_alive == 2
    bench.notes.payloads.clear()  # what the notes keep, the hub could not let go of
    bench.join(b"other")
    assert bench.say(b"other", Fetch(bench.sessions[b"other"])).version.number == 1
    assert bench.say(peer, Fetch(bench.sessions[b"pi"], partial=first.checksum)).version.number == 1


def test_after_a_rollback_nobody_goes_on_with_an_earlier_model():
    bench = Bench()
    peer, first = cut_in_mid_assignment(bench)
    fold_one(bench)
    engine = bench.engine
    engine.model._kept = engine.model._kept_last = engine.model.current
    engine._execute([Restore(2)])
    again = bench.say(peer, Fetch(bench.sessions[b"pi"], partial=first.checksum))
    assert again.checksum != first.checksum


def test_going_on_needs_no_room():
    bench = Bench(snapshots_max=2)
    peer, first = cut_in_mid_assignment(bench)
    fold_one(bench)
    again = bench.say(peer, Fetch(bench.sessions[b"pi"], partial=first.checksum))
    assert again.version.number == 0


@pytest.mark.parametrize("beyond", [len(WHOLE), len(WHOLE) + 1, 2**53])
def test_a_device_cannot_have_more_than_there_is(beyond):
    bench = Bench()
    bench.join(b"pi")
    assignment = bench.say(b"pi", Fetch(bench.sessions[b"pi"]))
    assert bench.say(b"pi", Credit(assignment.transfer, beyond)).code == "malformed"


def test_a_device_may_bound_pieces_and_messages():
    bench = Bench(piece_bytes=ByteCount(1 << 20))
    hello = Hello("pi", b"p" * 16, 1, piece_bytes_max=PIECE)
    session = bench.say(b"pi", hello).session
    assignment = bench.say(b"pi", Fetch(session))
    assert assignment.transfer > 0
    bench.say(b"pi", Credit(assignment.transfer, 0))
    assert len(bench.notes.payloads[-1]) == PIECE


def test_every_byte_is_counted_both_ways():
    bench = Bench()
    bench.join(b"pi")
    bench.say(b"pi", push_of(bench, b"pi"))
    bench.say(b"pi", *piece_of(0))
    (device,) = bench.engine.core.status(0.0)["devices"]
    said = [Hello("pi", b"pi".ljust(16, b"-"), 1, codecs=STAGES), push_of(bench, b"pi"), piece_of(0)[0]]
    assert device["bytes_up"] == sum(len(wire.encode(message)) for message in said) + PIECE
    answers = [message for _, message in bench.notes.sent]
    assert device["bytes_down"] == sum(len(wire.encode(message)) for message in answers)


def test_a_whole_model_is_not_taken_from_a_codec_that_does_not_bear_it():
    bench = Bench(policy=Policy(aggregate=ModelAverageAggregator(), optimizer=(SGD(),), monitor=Monitor(watch=())))
    bench.join(b"pi")
    for name, answer in (("int8", Refuse), ("float16", Assignment)):
        codec = make_codec(name, SPEC)
        payload = bytes(codec.encode(VectorSource(np.ones(SPEC.length, np.float32))))
        push = Push(
            bench.sessions[b"pi"], 1, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, name, wire.checksum(payload),
            len(payload),
        )  # fmt: skip
        assert isinstance(bench.say(b"pi", push, payload), answer)
    assert bench.engine.core.version == 1


# -- versions of the protocol ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("joined", [False, True])
def test_another_version_of_the_protocol_is_refused_in_a_line(version, joined):
    bench = Bench()
    if joined:
        bench.join(b"a")
    bench.engine.on_message(b"a", in_version(wire.encode(Hello("a", b"a" * 16, 1)), version), None, 0.0)
    peer, refuse = bench.notes.sent[-1]
    words = f"got protocol version {version}, expected {PROTOCOL_VERSION}; install the same edgeasync on"
    assert (peer, refuse) == (b"a", Refuse("protocol_version", f"{words} both sides"))
    assert bool(bench.engine.core.members.by_peer(b"a")) == joined


def whole_push(session, seq):
    """An update that changes nothing, in 8 bytes."""
    payload = b"\0\0\0\0\4\0\0\0"
    push = Push(
        session, seq, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, "top_k(0.01)", wire.checksum(payload), 8
    )  # fmt: skip
    return push, payload


def test_nothing_is_measured_for_a_push_that_is_not_decided_about(monkeypatch):
    """Red before: 8 bytes under any session bought a walk over the whole model."""
    bench, measured = Bench(), []
    norm = bench.engine.model.norm
    monkeypatch.setattr(bench.engine.model, "norm", lambda update: measured.append(update) or norm(update))
    bench.join(b"pi")
    session = bench.sessions[b"pi"]
    assert bench.say(b"pi", *whole_push(b"?" * 16, 1)).code == "unknown_session"
    assert bench.say(b"pi", *whole_push(session, 7)).code == "sequence"
    assert not measured
    assert isinstance(bench.say(b"pi", *whole_push(session, 1)), Assignment)
    assert isinstance(bench.say(b"pi", *whole_push(session, 1)), Assignment)
    assert len(measured) == 1
    assert bench.engine.core.duplicates == 1
    assert bench.engine.model.updates_waiting == 0


def test_the_worker_measures_the_updates_of_a_large_model_one_of_each_device():
    """Red before: the loop did it, and a few bytes of top_k or zstd may be a large model."""
    bench = Bench(spec=ParameterSpec((Parameter("w", (INLINE_BYTES_MAX // 4 + 1,)),)))
    bench.join(b"pi")
    waiting = []
    bench.notes.run_in_background = lambda work, then: waiting.append((work, then))
    for _ in range(5):
        answer = bench.say(b"pi", *whole_push(bench.sessions[b"pi"], 1))
    assert answer.code == "busy"
    assert len(waiting) == 1
    work, then = waiting.pop()
    then(work())
    assert bench.engine.core.updates_applied == 1
    assert bench.engine._capacity.measuring == 0


class NoWalk(dict):
    """Members that nobody may walk over."""

    def values(self):
        raise AssertionError("a walk over all members")

    items = __iter__ = values


def test_a_devices_own_status_costs_no_walk_over_all_devices(monkeypatch):
    """Red before: everybody's status was made, and the others' then left out."""
    bench = Bench()
    for number in range(5):
        key = b"%032d" % (number // 2)
        hello = Hello(f"pi-{number // 2}/{number}", b"%016d" % number, 1)
        bench.engine.on_message(
            b"%d" % number, wire.encode(hello), None, 0.0, Sender(key, f"pi-{number // 2}", "device")
        )
    bench.engine.core.check()
    bench.notes.describe = dict
    monkeypatch.setattr(bench.engine.core.members, "members", NoWalk(bench.engine.core.members.members))
    owner = Sender(b"%032d" % 1, "pi-1", "device")
    bench.engine.on_message(b"2", wire.encode(StatusRequest()), None, 0.0, owner)
    status = msgspec.json.decode(bench.notes.payloads[-1])
    assert [device["id"] for device in status["devices"]] == ["pi-1/2", "pi-1/3"]
