"""Faults of a link: lost, repeated, delayed, held and corrupt messages."""

from random import Random

import pytest

from edgeasync.protocol import wire
from edgeasync.protocol.messages import Ping
from simulation.link_faults import LinkFaults

# -- links -----------------------------------------------------------------------------------------------------

PING = wire.encode(Ping(bytes(16), 1.0, 2))


def met(trouble, times=400, payload=b"payload" * 20):
    random = Random(0)
    return [trouble.meet(PING, payload, random, 10.0) for _ in range(times)]


def test_messages_are_lost_repeated_late_and_held():
    arrived = met(LinkFaults(lost=0.5))
    assert 150 < sum(not copies for copies in arrived) < 250
    arrived = met(LinkFaults(repeated=0.5))
    assert {len(copies) for copies in arrived} == {1, 2}
    delays = [delay_s for copies in met(LinkFaults(late=0.5, late_s=3.0)) for delay_s, _, _ in copies]
    assert 150 < sum(delay_s > 0.0 for delay_s in delays) < 250
    assert 2.5 < max(delays) <= 3.0
    assert met(LinkFaults(lost=1.0, held_until_s=12.5), 1) == [[(2.5, PING, b"payload" * 20)]]
    assert met(LinkFaults(lost=1.0, held_until_s=9.0), 1)[0][0][0] == 0.0


def test_corrupt_messages_never_read_as_others():
    kinds = set()
    for copies in met(LinkFaults(corrupt=1.0)):
        for _, header, payload in copies:
            if header == PING:
                assert payload != b"payload" * 20
                kinds.add("short payload" if len(payload) < 140 else "payload")
            else:
                assert payload == b"payload" * 20
                kinds.add("short header" if len(header) < len(PING) else "header")
                with pytest.raises(wire.ProtocolError):
                    wire.decode(header)
    assert kinds == {"payload", "short payload", "header", "short header"}
