"""A hub engine under test, with devices that read what it sends."""

import numpy as np

from edgeasync.config import ByteCount
from edgeasync.core.arrays.hub_model import HubModel
from edgeasync.core.engine.hub_engine import HubEngine
from edgeasync.core.hub.hub_core import HubCore
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits, Liveness
from edgeasync.core.recovery.replay import Sessions
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.monitor import Monitor
from edgeasync.protocol import wire
from edgeasync.protocol.codecs import STAGES
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import FetchGraph, Hello, ModelVersion, Piece, Push, Welcome
from tests.support.parts.small_runs import plain

SPEC = ParameterSpec((Parameter("w", (50_000,)),))
PIECE = 65_536
LINEAGE = "0" * 16
POLICY = plain(16, monitor=Monitor(detectors=()))


class Notes:
    """A shell that keeps what it is asked to send."""

    def __init__(self):
        self.sent = []
        self.payloads = []
        self.reports = []

    def send(self, peer, header, payload):
        self.sent.append((peer, wire.decode(header)))
        self.payloads.append(payload)

    def report(self, report):
        self.reports.append(report.event)

    def describe(self):
        return {}

    def address_of(self, peer):
        return ""

    def wall_s(self):
        return 0.0

    def save(self, snapshot, *, last):
        pass

    def run_in_background(self, work, then):
        then(work())


class HeldLog:
    """A log of which nothing becomes durable until it is told to."""

    failing = ""

    def __init__(self):
        self.entries = []
        self.durable = self.bytes_waiting = self.bytes_appended = 0

    @property
    def last(self):
        return len(self.entries)

    def append(self, entry, payload, checksum=None):
        assert payload is None or checksum == wire.checksum(payload)
        self.entries.append(bytes(entry))
        self.bytes_waiting += len(entry)

    def commit(self):
        pass

    def move(self):
        self.durable, self.bytes_waiting = self.last, 0


class Bench:
    def __init__(self, graph=None, codec=FLOAT32, policy=POLICY, spec=SPEC, log=None, **limits):
        self.notes = Notes()
        numbers = iter(range(1, 100))
        sessions = Sessions(lambda: next(numbers).to_bytes(16, "big"))
        core = HubCore(
            spec=spec,
            training={},
            policy=policy,
            settings=HubCoreSettings(
                codec=codec,
                liveness=Liveness(heartbeat_s=1.0, lease_s=5.0),
                limits=Limits(**{"piece_bytes": ByteCount(PIECE)} | limits),
            ),
            version=ModelVersion(LINEAGE, 0),
            graph=graph,
            make_session=sessions,
            now_s=0.0,
        )
        model = HubModel(spec, np.zeros(spec.length, np.float32), 0, policy)
        self.engine = HubEngine(core, model, self.notes, sessions=sessions, log=log)
        self.sessions = {}

    def say(self, peer, message, payload=None, at_s=0.0):
        self.engine.on_message(peer, wire.encode(message), payload, at_s)
        return [message for to, message in self.notes.sent if to == peer][-1]

    def join(self, name):
        welcome = self.say(name, Hello(name.decode(), name.ljust(16, b"-"), 1, codecs=STAGES))
        assert isinstance(welcome, Welcome)
        self.sessions[name] = welcome.session

    def announce(self, name, at_s=0.0, nbytes=SPEC.nbytes):
        payload = bytes(nbytes)
        push = Push(
            self.sessions[name], 1, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, "identity",
            wire.checksum(payload), len(payload), transfer=1,
        )  # fmt: skip
        return self.say(name, push, at_s=at_s)


GRAPH = ShippedGraph(bytes(range(256)) * 1000)


def fetch_graph(bench, name, at_s=0.0):
    return bench.say(name, FetchGraph(bench.sessions[name]), at_s=at_s)


WHOLE = np.arange(SPEC.length, dtype=np.float32).tobytes()


def push_of(bench, name, *, seq=1, payload=WHOLE, transfer=1, codec="identity"):
    return Push(
        bench.sessions[name], seq, ModelVersion(LINEAGE, 0), 1, 1, 0.0, 0.0, 0.1, codec,
        wire.checksum(payload), len(payload), transfer=transfer,
    )  # fmt: skip


def piece_of(offset, *, transfer=1, payload=WHOLE):
    part = payload[offset : offset + PIECE]
    return Piece(transfer, offset, wire.checksum(part)), part
