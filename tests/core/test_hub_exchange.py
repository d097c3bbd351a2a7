"""The hub's exchange by itself: frames in, frames out, with a shell that only takes notes."""

import numpy as np

from edgeasync.config import ByteCount
from edgeasync.core.graph import ShippedGraph
from edgeasync.core.hub import HubCore
from edgeasync.core.hub_exchange import HubExchange
from edgeasync.core.model import Model
from edgeasync.core.settings import FLOAT32, HubCoreSettings, Limits, Liveness
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
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
    Welcome,
)

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

    def run_in_background(self, work, then):
        then(work())


class Bench:
    def __init__(self, graph=None, **limits):
        self.notes = Notes()
        sessions = iter(range(1, 100))
        core = HubCore(
            spec=SPEC,
            training={},
            judgement=POLICY,
            settings=HubCoreSettings(
                codec=FLOAT32,
                liveness=Liveness(heartbeat_s=1.0, lease_s=5.0),
                limits=Limits(piece_bytes=ByteCount(PIECE), **limits),
            ),
            version=ModelVersion(LINEAGE, 0),
            graph=graph,
            make_session=lambda: next(sessions).to_bytes(16, "big"),
            now_s=0.0,
        )
        self.exchange = HubExchange(core, Model(SPEC, np.zeros(SPEC.length, np.float32), 0, POLICY), self.notes)
        self.sessions = {}

    def say(self, peer, message, payload=None, at_s=0.0):
        self.exchange.on_message(peer, wire.encode(message), payload, at_s)
        return [message for to, message in self.notes.sent if to == peer][-1]

    def join(self, name):
        welcome = self.say(name, Hello((1,), name.decode(), name.ljust(16, b"-"), 1))
        assert isinstance(welcome, Welcome)
        self.sessions[name] = welcome.session

    def announce(self, name, at_s=0.0):
        payload = bytes(SPEC.nbytes)
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
    assert bench.exchange._outgoing.shared_count == 0


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
    assert bench.exchange._outgoing.shared_count == 2
    for name in (b"b", b"c"):
        bench.exchange.on_message(name, wire.encode(Leave("stopping", bench.sessions[name])), None, 6.0)
    assert bench.exchange._outgoing.shared_count == 0
