"""The last events of a core: bounded, in order, and without what would let somebody pass for a device."""

from edgeasync.core.engine.recorder import EVENTS_KEPT, LINE_LENGTH_MAX, Recorder, shown
from edgeasync.core.hub.effects import Report, Send
from edgeasync.core.hub.events import Received
from edgeasync.protocol.messages import Hello, Leave, Ping


def test_events_are_kept_with_what_the_core_made_of_them():
    recorder = Recorder()
    recorder.begin(1.5, Received(b"a", Ping(b"s" * 16, 0.5, 7)))
    recorder.end([Report("paused", "a", "no local step"), Send(b"a", Leave("finished"))])
    recorder.begin(2.0, "tick")
    event, report, send, tick = recorder.lines()
    assert event.startswith("1.500 s Received(")
    assert "steps_total=7" in event
    assert report.startswith("    Report(event='paused'")
    assert send.startswith("    Send(")
    assert tick == "2.000 s tick", "an event that raised is there all the same"


def test_only_the_last_are_kept():
    recorder = Recorder()
    for number in range(EVENTS_KEPT + 10):
        recorder.begin(float(number), "tick")
        recorder.end(["a"])
    assert len(recorder.lines()) == 2 * EVENTS_KEPT
    assert recorder.lines()[0] == "10.000 s tick"


def test_no_line_tells_a_secret():
    recorder = Recorder()
    for secret in (b"0123456789abcdef", b"'\"\\'\"\\'\"\\'\"\\'\"\\\\", bytes(range(16)), b"\n" * 16):
        recorder.begin(0.0, Received(b"a", Hello((2,), "pi", secret, 1, session=secret)))
        (line,) = recorder.lines()
        assert repr(secret)[2:-1] not in line
        assert "state_id=..., start=1, session=..., seq_answered=" in line
        recorder = Recorder()


def test_what_a_stranger_made_large_or_deep_is_shown_in_short():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for settings in ({"a": deep}, {"a": [[]] * 10**6}, {"a": "x" * 10**6}, {str(key): 1 for key in range(10**5)}):
        assert len(shown(Received(b"a", settings))) <= LINE_LENGTH_MAX + 3
