"""The last events of a core: bounded, in order, and without what would let somebody pass for a device."""

import pytest
from msgspec import inspect

from edgeasync.core.device import events as device_events
from edgeasync.core.device.effects import PrepareTraining, SendPush
from edgeasync.core.engine.device_engine import _to_record
from edgeasync.core.engine.recorder import EVENTS_KEPT, LINE_LENGTH_MAX, Recorder, shown
from edgeasync.core.hub.effects import HubReport, SendToDevice
from edgeasync.core.hub.events import HubReceived
from edgeasync.parameters import ParameterSpec
from edgeasync.protocol.messages import MESSAGES, Goodbye, Hello, ModelVersion, Ping, Push, Welcome

SECRET = b"0123456789abcdef"
WELCOME = Welcome(SECRET, ParameterSpec(()), {"name": "x" * 10**6}, 0, "identity", 1.0, 3.0, 1 << 16)
PUSH = Push(SECRET, 1, ModelVersion("0" * 16, 1), 8, 64, 0.5, 0.25, 0.125, "int8", 1, 12)


def test_events_are_kept_with_what_the_core_made_of_them():
    recorder = Recorder()
    recorder.begin(1.5, HubReceived(b"a", Ping(b"s" * 16, 0.5, 7)))
    recorder.end([HubReport("paused", "a", "no local step"), SendToDevice(b"a", Goodbye("finished"))])
    recorder.begin(2.0, "tick")
    event, report, send, tick = recorder.lines()
    assert event.startswith("1.500 s HubReceived(")
    assert "steps_total=7" in event
    assert report.startswith("    HubReport(event='paused'")
    assert send.startswith("    SendToDevice(")
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
        recorder.begin(0.0, HubReceived(b"a", Hello("pi", secret, 1, session=secret)))
        (line,) = recorder.lines()
        assert repr(secret)[2:-1] not in line
        assert "state_id=..., incarnation=1, session=..., seq_answered=" in line
        recorder = Recorder()


def test_what_a_stranger_made_large_or_deep_is_shown_in_short():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for settings in ({"a": deep}, {"a": [[]] * 10**6}, {"a": "x" * 10**6}, {str(key): 1 for key in range(10**5)}):
        assert len(shown(HubReceived(b"a", settings))) <= LINE_LENGTH_MAX + 3


def is_bounded(kind):
    """Whether what a peer may put into a field of this type is short."""
    match kind:
        case inspect.StrType():
            return kind.max_length is not None or (kind.pattern is not None and not set("*+") & set(kind.pattern))
        case inspect.BytesType():
            return kind.max_length is not None
        case inspect.VarTupleType():
            return kind.max_length is not None and is_bounded(kind.item_type)
        case inspect.DictType():
            return kind.max_length is not None and is_bounded(kind.key_type) and is_bounded(kind.value_type)
        case inspect.StructType():
            return all(is_bounded(field.type) for field in kind.fields)
        case inspect.UnionType():
            return all(map(is_bounded, kind.types))
    return isinstance(
        kind, inspect.IntType | inspect.FloatType | inspect.NoneType | inspect.BoolType | inspect.LiteralType
    )


def test_only_a_welcome_can_be_large():
    """So a device keeps all others as they are: 256 take some 230 kB, and under 4 MB whatever a hub sends."""
    large = [message for message in MESSAGES.values() if not is_bounded(inspect.type_info(message))]
    assert large == [Welcome]


def test_a_device_keeps_no_welcome_and_all_else_as_it_is():
    for large in (device_events.DeviceReceived(WELCOME), PrepareTraining(WELCOME)):
        text = _to_record(large)
        assert isinstance(text, str)
        assert len(text) <= LINE_LENGTH_MAX + 3
        assert SECRET.decode() not in text
    for small in (device_events.DeviceReceived(Goodbye("finished")), SendPush(PUSH), device_events.Kept(3)):
        assert _to_record(small) is small


@pytest.mark.parametrize("effect", [SendPush(PUSH), device_events.DeviceReceived(PUSH)])
def test_what_a_device_keeps_as_it_is_tells_no_secret(effect):
    recorder = Recorder()
    recorder.begin(0.0, effect)
    recorder.end([effect])
    assert all(SECRET.decode() not in line and "session=..." in line for line in recorder.lines())
