"""The hub's exchange by itself: frames in, frames out, with a shell that only takes notes."""

import math

import msgspec
import numpy as np
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.core.engine.fold_queue import INLINE_BYTES_MAX
from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.events import Heard, HubStopRequested, Ticked
from edgeasync.core.hub.hub_core import UNCOUNTED_BYTES_MAX
from edgeasync.core.hub.settings import CodecSettings
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ModelAverageAggregator
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import STAGES, VectorSource, make_codec
from edgeasync.protocol.graph import Base, ShippedBase, ShippedGraph, fingerprint_of
from edgeasync.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Credit,
    Fetch,
    FetchGraph,
    GraphHeader,
    Hello,
    ModelVersion,
    Piece,
    Push,
    Refuse,
    StatusRequest,
)
from tests.support.formats.versions import in_version
from tests.support.parts.engine_bench import GRAPH, LINEAGE, PIECE, SPEC, Bench, fetch_graph, piece_of, push_of


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("transfer", [0, 1])
def test_a_metric_that_is_no_number_is_refused_and_does_not_count(bad, transfer):
    bench = Bench()
    bench.join(b"pi")
    payload = bytes(SPEC.nbytes)
    push = push_of(bench, b"pi", payload=payload, transfer=transfer)
    push = msgspec.structs.replace(push, metrics={"f1": 0.5, "mae": bad})
    answer = bench.say(b"pi", push, None if transfer else payload)
    assert (type(answer), answer.code, answer.sentence) == (Refuse, "malformed", "a metric is not finite")
    assert bench.engine.core.updates_applied == 0


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
    core.handle(Ticked() if end == "lost" else HubStopRequested(), 5.0)
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
    push = push_of(bench, b"pi", payload=values, transfer=0)
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
    push = push_of(bench, b"pi", payload=payload)
    assert say(push) == Credit(1, 0)
    part = payload[:PIECE]
    assert say(Piece(1, 0, wire.checksum(part)), part) == Credit(1, PIECE)
    assert bench.announce(b"worker").code == "busy"
    bench.engine.revoke(key, 1.0)
    assert len(bench.engine._intake.incoming) == 0
    assert not bench.engine._deliveries.outgoing._active
    assert not bench.engine._deliveries.outgoing._suspended
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


def test_a_small_graph_goes_out_in_one_message():
    graph = ShippedGraph(b"a graph")
    bench = Bench(graph)
    bench.join(b"pi")
    assert fetch_graph(bench, b"pi") == GraphHeader(graph.fingerprint, graph.checksum, 7)
    assert bench.notes.payloads[-1] is graph.payload


def test_a_graph_goes_out_in_pieces_of_the_one_object():
    bench = Bench(GRAPH)
    bench.join(b"pi")
    announced = fetch_graph(bench, b"pi")
    assert announced == GraphHeader(GRAPH.fingerprint, GRAPH.checksum, len(GRAPH.payload), 1)
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
    assert bench.engine._deliveries.outgoing.graphs == 0


@pytest.mark.parametrize("nbytes", [10, 3 * PIECE])
def test_a_base_goes_out_in_pieces_from_any_byte(nbytes):
    content = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
    base = ShippedBase(Base(fingerprint_of(content), nbytes), content)
    bench = Bench(ShippedGraph(b"a graph", base))
    bench.join(b"pi")
    fetch = FetchGraph(bench.sessions[b"pi"], base=True)
    announced = bench.say(b"pi", fetch)
    assert announced == GraphHeader(base.file.fingerprint, base.checksum, nbytes, 1)
    assert bench.notes.payloads[-1] is None
    assert bench.say(b"pi", Credit(1, nbytes - 1)) == Piece(1, nbytes - 1, wire.checksum(content[-1:]))
    assert bench.notes.payloads[-1].obj is content
    assert bench.say(b"pi", fetch).transfer == 2, "after a lost connection"


@pytest.mark.parametrize("graph", [None, ShippedGraph(b"a graph")])
def test_a_base_that_was_not_announced_is_a_fault(graph):
    bench = Bench(graph)
    bench.join(b"pi")
    answer = bench.say(b"pi", FetchGraph(bench.sessions[b"pi"], base=True))
    assert (answer.code, bench.engine.core.messages_refused) == ("malformed", 1)
    assert "no base" in answer.sentence


def test_a_device_may_bound_pieces_and_messages():
    bench = Bench(piece_bytes=ByteCount(1 << 20))
    hello = Hello("pi", b"p" * 16, 1, piece_bytes_max=PIECE)
    session = bench.say(b"pi", hello).session
    assignment = bench.say(b"pi", Fetch(session))
    assert assignment.transfer > 0
    bench.say(b"pi", Credit(assignment.transfer, 0))
    assert len(bench.notes.payloads[-1]) == PIECE


def test_a_whole_model_is_not_taken_from_a_codec_that_does_not_bear_it():
    bench = Bench(
        policy=Policy(aggregate=ModelAverageAggregator(), optimizer=(SGD(),), monitor=Monitor(detectors=()))
    )
    bench.join(b"pi")
    for name, answer in (("int8", Refuse), ("float16", Assignment)):
        codec = make_codec(name, SPEC)
        payload = bytes(codec.encode(VectorSource(np.ones(SPEC.length, np.float32))))
        push = push_of(bench, b"pi", payload=payload, transfer=0, codec=name)
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
    words = f"got protocol version {version}, expected {PROTOCOL_VERSION}; install the same version of edgeasync"
    assert (peer, refuse) == (b"a", Refuse("protocol_version", f"{words} on both sides"))
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
