"""Resuming an interrupted transfer over another connection."""

import numpy as np
import pytest

from edgeasync.core.engine.hub_transfers import SUSPENDED_S
from edgeasync.core.hub.effects import Restore
from edgeasync.protocol.messages import Credit, Fetch, Hello, Welcome
from tests.support.parts.engine_bench import PIECE, SPEC, WHOLE, Bench, piece_of, push_of


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
    assert len(bench.engine._intake.incoming) == 1


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
    assert len(bench.engine._intake.incoming) == 2
    bench.join(b"c")
    assert bench.say(b"c", push_of(bench, b"c"), at_s=1.0) == Credit(1, 0)
    assert len(bench.engine._intake.incoming) == 2, "the one of a made way"
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
    assert len(bench.engine._intake.incoming) == 1
    assert bench.say(peer, push_of(bench, b"pi", transfer=2, codec="float16", payload=WHOLE[::2])) == Credit(2, 0)
    assert len(bench.engine._intake.incoming) == 1


def test_what_was_cut_off_is_not_kept_for_ever():
    bench = Bench()
    peer = cut_in_mid_push(bench, at_s=2.0)
    bench.engine.tick(SUSPENDED_S + 1.0)
    assert len(bench.engine._intake.incoming) == 1
    bench.engine.tick(SUSPENDED_S + 3.0)
    assert len(bench.engine._intake.incoming) == 0
    assert bench.say(peer, push_of(bench, b"pi", transfer=2), at_s=SUSPENDED_S + 3.0) == Credit(2, 0)


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
    assert not bench.engine._deliveries.outgoing._partials


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


@pytest.mark.parametrize("beyond", [len(WHOLE), len(WHOLE) + 1, 2**53])
def test_a_device_cannot_have_more_than_there_is(beyond):
    bench = Bench()
    bench.join(b"pi")
    assignment = bench.say(b"pi", Fetch(bench.sessions[b"pi"]))
    assert bench.say(b"pi", Credit(assignment.transfer, beyond)).code == "malformed"


def test_going_on_needs_no_room():
    bench = Bench(snapshots_max=2)
    peer, first = cut_in_mid_assignment(bench)
    fold_one(bench)
    again = bench.say(peer, Fetch(bench.sessions[b"pi"], partial=first.checksum))
    assert again.version.number == 0


def test_the_same_bytes_in_another_codec_start_anew():
    bench, half = Bench(), WHOLE[: len(WHOLE) // 2]
    bench.join(b"pi")
    bench.say(b"pi", push_of(bench, b"pi", payload=half, codec="float16"))
    bench.say(b"pi", *piece_of(0, payload=half))
    peer = reconnect(bench, b"pi", 2)
    other = push_of(bench, b"pi", payload=half, codec="bfloat16", transfer=2)
    assert bench.say(peer, other) == Credit(2, 0)
