"""Memory limits of the hub: stalled and old transfers are dropped first."""

import numpy as np
import pytest

from edgeasync.core.hub.settings import FLOAT32, CodecSettings
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    Assignment,
    Credit,
    Fetch,
    Goodbye,
    GraphHeader,
    Piece,
    Ping,
    Refuse,
)
from tests.support.parts.engine_bench import GRAPH, PIECE, SPEC, Bench, fetch_graph, push_of


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


CODED = {
    "float32": FLOAT32,
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
        push = push_of(bench, b"pusher", seq=number + 1, payload=payload, transfer=number + 1)
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


@pytest.mark.parametrize("codec", CODED.values(), ids=CODED)
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


def test_a_graph_is_sent_to_so_many_at_once_and_whoever_stalls_makes_way():
    bench = Bench(GRAPH, snapshots_max=2)
    for name in (b"a", b"b", b"c"):
        bench.join(name)
    assert isinstance(fetch_graph(bench, b"a"), GraphHeader)
    assert isinstance(fetch_graph(bench, b"b"), GraphHeader)
    assert isinstance(fetch_graph(bench, b"b"), GraphHeader), "its own place, again"
    assert fetch_graph(bench, b"c", at_s=1.0).code == "busy"
    bench.say(b"b", Credit(3, 0), at_s=4.0)
    assert fetch_graph(bench, b"c", at_s=4.5).code == "busy"
    assert isinstance(fetch_graph(bench, b"c", at_s=5.5), GraphHeader)
    assert bench.engine._deliveries.outgoing.graphs == 2
    for name in (b"b", b"c"):
        bench.engine.on_message(name, wire.encode(Goodbye("stopping", bench.sessions[name])), None, 6.0)
    assert bench.engine._deliveries.outgoing.graphs == 0
