"""A disk that hangs: what waits for it is bounded, and the hub continues once the disk moves again."""

import numpy as np

from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.core.engine.log_writer import ANSWERS_MIN as HELD_MAX
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import HubCoreSettings, Limits, Liveness
from edgeasync.core.recovery.replay import Sessions
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Fetch, Hello, ModelVersion, Ping, Pong, Refuse, Welcome
from tests.support.codecs.coded import flat

SPEC = flat(10)


class HangingLog:
    """A log of which nothing becomes durable until it is told to."""

    failing = ""

    def __init__(self):
        self.last = self.durable = self.bytes_waiting = self.bytes_appended = 0

    def append(self, entry, payload):
        self.last += 1
        self.bytes_waiting += len(entry)

    def commit(self):
        pass

    def move(self):
        self.durable, self.bytes_waiting = self.last, 0


class Notes:
    """A shell that keeps what it is asked to send, and what is reported."""

    def __init__(self):
        self.sent, self.reports = [], []

    def send(self, peer, header, payload):
        self.sent.append(wire.decode(header))

    def describe(self):
        return {}

    def report(self, report):
        self.reports.append(report.event)


def test_what_waits_for_a_disk_that_hangs_is_bounded_and_nobody_is_lost():
    log, notes, sessions = HangingLog(), Notes(), Sessions(lambda: b"s" * 16)
    core = HubCore(
        spec=SPEC,
        training={},
        policy=Policy(),
        settings=HubCoreSettings(
            liveness=Liveness(heartbeat_s=1.0, lease_s=3.0), limits=Limits(devices_max=1, retry_after_s=0.5)
        ),
        version=ModelVersion("0" * 16, 0),
        make_session=sessions,
        now_s=0.0,
    )
    model = HubModel(SPEC, np.zeros(10, np.float32), 0, Policy())
    engine = HubEngine(core, model, notes, sessions=sessions, log=log)

    def hear(message, now_s):
        engine.on_message(b"peer", wire.encode(message), None, now_s)

    hear(Hello("glutton", b"0" * 16, 1), 0.0)
    for _ in range(2 * HELD_MAX):
        hear(Fetch(b"s" * 16), 0.1)
    assert notes.reports == ["not_writing"]
    assert log.last == HELD_MAX  # an answer for each, and what reports the first
    assert {type(message) for message in notes.sent} == {Refuse}
    assert notes.sent[0].retry_after_s == 0.5
    hear(Ping(b"s" * 16, 7.0, 0), 1.0)
    assert isinstance(notes.sent[-1], Pong)
    engine.tick(100.0)

    log.move()
    engine.on_durable(100.0)
    assert notes.reports == ["not_writing", "writing", "joined"]
    answers = [type(message) for message in notes.sent if not isinstance(message, Refuse | Pong)]
    assert answers == [Welcome, *[Assignment] * (HELD_MAX - 1)]
    engine.tick(102.0)
    hear(Ping(b"s" * 16, 7.0, 0), 102.5)
    assert core.members.members["glutton"].live
