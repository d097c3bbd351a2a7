"""A device's word of its pace: bounded, and text that cannot steer a terminal."""

import math

import pytest

from edgeasync.errors import ProtocolError
from edgeasync.protocol import wire
from edgeasync.protocol.messages import HEARTBEAT_BYTES, Ping, Pong

SESSION = b"s" * 16


def test_a_ping_says_a_pace_and_with_its_answer_is_as_long_as_is_reckoned():
    ping = Ping(SESSION, 1e6, 2**31, 0.25, 0, "85 C", 85.0)
    assert wire.decode(wire.encode(ping)) == ping
    usual = Ping(SESSION, 1e6, 2**31, 0.25, temperature_c=61.5)
    assert len(wire.encode(usual)) + len(wire.encode(Pong(1e6))) == HEARTBEAT_BYTES


def test_a_ping_without_a_pace_is_one_at_full_pace():
    ping = wire.decode(b"\x94\x01\x09\x94\xc4\x10" + SESSION + b"\x01\x02\x03\xc4\x00")
    assert (ping.pace_percent, ping.pace_reason, ping.temperature_c) == (100, "", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pace_percent": 101}, {"pace_percent": -1}, {"pace_reason": "x" * 33}, {"pace_reason": "\x1b[2J"},
        {"pace_reason": "hot\n"}, {"pace_reason": "81 °C"}, {"pace_reason": "\u202egnp"},
        {"temperature_c": math.nan}, {"temperature_c": math.inf}, {"temperature_c": -300.0},
        {"clock_s": math.nan}, {"clock_s": math.inf}, {"clock_s": -1.0}, {"clock_s": 1e12},
    ],
)  # fmt: skip
def test_a_pace_that_is_none_is_malformed(wrong):
    with pytest.raises(ProtocolError, match="Ping"):
        wire.decode(wire.encode(Ping(SESSION, 1.0, 2, **wrong)))
