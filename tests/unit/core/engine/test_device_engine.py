"""The device's engine with a shell that does nothing: what of the hub's frames reaches the core."""

from random import Random
from unittest.mock import Mock

import pytest

from edgeasync.core.device.device_core import DeviceCore
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.engine.device_engine import DeviceEngine
from edgeasync.errors import RefusedError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.messages import PROTOCOL_VERSION, Ack, Applied, Hello, Piece, Welcome
from tests.support.formats.versions import in_version

WELCOME = Welcome(bytes(16), ParameterSpec((Parameter("weights", (4,)),)), {}, 0, "identity", 1.0, 3.0, 1 << 16)


@pytest.fixture
def engine():
    core = DeviceCore(Hello("pi-1", bytes(16), 1), DeviceLimits(), Random(0))
    engine = DeviceEngine(core, Mock(), Mock(), lambda: 1.0)
    engine.begin()
    engine.on_message(wire.encode(WELCOME), None)
    return engine


def told(engine):
    return [(call.args[0].event, call.args[0].detail) for call in engine._shell.report.call_args_list]


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_hub_of_another_protocol_version_ends_the_device_in_a_line(engine, version):
    engine.on_message(in_version(wire.encode(WELCOME), version), None)
    (stop,) = [call.args[0] for call in engine._shell.stop.call_args_list]
    assert isinstance(stop.error, RefusedError)
    words = f"got protocol version {version}, expected {PROTOCOL_VERSION}; install the same version of edgeasync"
    assert str(stop.error) == f"{words} on both sides"


def test_a_piece_without_its_bytes_is_told_of(engine):
    engine.on_message(wire.encode(Piece(1, 0, 0)), None)
    assert told(engine)[1:] == [("warning", "the hub sent an invalid message: a piece has no payload")]


def test_a_piece_that_belongs_to_no_transfer_is_late_and_not_told_of(engine):
    engine.on_message(wire.encode(Piece(1, 0, 0)), b"late")
    assert told(engine)[1:] == []


def test_a_message_that_does_not_fit_is_told_of_and_in_the_record(engine):
    engine.on_message(wire.encode(Ack(3, Applied(1))), None)
    assert [event for event, _ in told(engine)[1:]] == ["unexpected"]
    assert "Ack of another update" in engine.recorder.lines()[-1]
