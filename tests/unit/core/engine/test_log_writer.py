"""A disk that hangs: what waits for it is bounded, and the hub continues once the disk moves again."""

from edgeasync.core.engine.log_writer import ANSWERS_MIN as HELD_MAX
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Fetch, Hello, Ping, Pong, Refuse, Welcome
from tests.support.parts.engine_bench import Bench, HeldLog

SESSION = (1).to_bytes(16, "big")


def test_what_waits_for_a_disk_that_hangs_is_bounded_and_nobody_is_lost():
    log = HeldLog()
    bench = Bench(log=log, devices_max=1, retry_after_s=0.5)
    engine, notes = bench.engine, bench.notes

    def hear(message, now_s):
        engine.on_message(b"peer", wire.encode(message), None, now_s)

    hear(Hello("glutton", b"0" * 16, 1), 0.0)
    for _ in range(2 * HELD_MAX):
        hear(Fetch(SESSION), 0.1)
    assert notes.reports == ["not_writing"]
    assert log.last == HELD_MAX  # an answer for each, and what reports the first
    assert {type(message) for _, message in notes.sent} == {Refuse}
    assert notes.sent[0][1].retry_after_s == 0.5
    hear(Ping(SESSION, 7.0, 0), 1.0)
    assert isinstance(notes.sent[-1][1], Pong)
    engine.tick(100.0)

    log.move()
    engine.on_durable(100.0)
    assert notes.reports == ["not_writing", "writing", "joined"]
    answers = [type(message) for _, message in notes.sent if not isinstance(message, Refuse | Pong)]
    assert answers == [Welcome, *[Assignment] * (HELD_MAX - 1)]
    engine.tick(102.0)
    hear(Ping(SESSION, 7.0, 0), 102.5)
    assert engine.core.members.members["glutton"].live
