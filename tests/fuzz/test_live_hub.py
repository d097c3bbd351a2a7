"""Ten thousand random and mutated messages thrown at a live hub: it trains on, and counts every one of them."""

import asyncio
import math
import signal
import time
from random import Random

import msgpack
import msgspec
import numpy as np
import pytest
import zmq

from edgeasync import Dataset, fetch_status
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.graphs.model_file import load_model
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    Assignment,
    Credit,
    Fetch,
    FetchGraph,
    Goodbye,
    Hello,
    ModelVersion,
    Piece,
    Ping,
    Push,
    Refuse,
    StatusRequest,
    Welcome,
)
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.plan import read_plan
from tests.fuzz.mutations import NASTY_VALUES, mutated
from tests.support.formats.write_formats import make_messages
from tests.support.parts.agents import agent_parts
from tests.support.programs.processes import PATIENCE_S, Commands

pytestmark = [pytest.mark.process, pytest.mark.gate, pytest.mark.asyncio]

HONEST = "honest"
MODEL = MlpModel(inputs=64, hidden=(256,), classes=10)  # a payload is two pieces
MODEL_TABLE = 'kind = "mlp"\ninputs = 64\nhidden = [256]\nclasses = 10'
# A client that stalls keeps a place, an update and a snapshot until its lease ends, which is late here.
SETTINGS = """
[policy]
aggregate = { kind = "immediate" }  # one honest device is no quorum of a fleet of attackers
optimizer = [{ kind = "sgd" }]
frequency = { kind = "fixed", local_steps = 4 }
[codec]  # float32 is longer than a piece: all kinds of messages are needed
push = "identity"
model = "identity"
delta = "off"
[liveness]
heartbeat_s = 0.5
lease_s = 120.0
[limits]
piece_bytes = "64 KiB"
devices_max = 70
strikes_max = 60
updates_held_max = 256
snapshots_max = 256
"""

HEADER_BYTES = 2000
"""A longer header counts for several messages, and the hub holds off who says too many."""

ATTACKERS = 5
CONNECTIONS_EACH = 16
MESSAGES_EACH = 130  # on one connection: more than it takes to be quarantined
MARKER_VERSION = 1_000_000
ANSWER_S = 5.0

OF_A_DEVICE = (Hello, Fetch, FetchGraph, Push, Piece, Credit, Ping, Goodbye, StatusRequest)
OF_A_HUB = [message for message in make_messages() if not isinstance(message, OF_A_DEVICE)]


class Attacker:
    """Sends nonsense over one raw socket after the other, and keeps count. Its choices are seeded."""

    def __init__(self, address, number):
        self.sent = 0
        self.kinds_seen = set()
        self._address = address
        self._number = number
        self._random = Random(number)
        self._markers = 0
        self._lengths = [MODEL.spec.nbytes, MODEL.spec.nbytes // 2]

    def run(self):
        context = zmq.Context()
        try:
            for connection in range(CONNECTIONS_EACH):
                with context.socket(zmq.DEALER) as self._socket:
                    self._socket.set(zmq.LINGER, 0)
                    self._socket.set(zmq.SNDTIMEO, round(1000 * PATIENCE_S))
                    self._socket.connect(self._address)
                    self._name = f"attacker-{self._number}-{connection}"
                    self._session, self._seq = self._random.randbytes(16), 0
                    self._version, self._transfer = ModelVersion("0" * 16, 0), 0
                    self._one_connection(wild=connection % 2 == 0)
        finally:
            context.destroy()
        return self

    def _one_connection(self, *, wild):
        self._send([wire.encode(self._hello())])
        for message in (StatusRequest(), Fetch(self._session)):
            self._socket.poll(1000)  # so that most know their session and the version; it does not matter
            self._read()
            self._send([wire.encode(message)])
        for _ in range(MESSAGES_EACH - 3):
            self._read()
            self._send(self._frames() if wild else self._polite_frames())
        self._wait_until_all_is_read()

    # -- the socket ------------------------------------------------------------------------------------------

    def _send(self, frames):
        self._socket.send_multipart(frames)
        self.sent += 1

    def _read(self):
        """Read the answers so far: with them the next lies are better ones."""
        while self._socket.poll(0):
            self._heed(wire.decode(self._socket.recv_multipart()[0]))

    def _heed(self, message):
        self.kinds_seen.add(getattr(message, "code", type(message).__name__))
        match message:
            case Welcome():
                self._session, self._seq = message.session, message.seq_last
            case Assignment():
                self._version = message.version
                self._transfer = message.transfer
                if message.ack is not None:
                    self._seq = max(self._seq, message.ack.seq)
        return message

    def _wait_until_all_is_read(self):
        """A connection keeps its order: once the hub has answered the last message it has had them all.

        The last one is of a protocol version that names this attempt; an answer may be dropped, so it is said
        again after a while, and counted.
        """
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._markers += 1
            version = MARKER_VERSION + self._markers
            self._send([pack(Fetch.kind, [], version)])
            while self._socket.poll(1000 * ANSWER_S):
                message = self._heed(wire.decode(self._socket.recv_multipart()[0]))
                if isinstance(message, Refuse) and f"protocol version {version}, expected" in message.sentence:
                    return
        raise AssertionError("the hub did not answer any more")

    # -- what to send ----------------------------------------------------------------------------------------

    def _frames(self):
        """Return any frames at all."""
        random = self._random
        message, payload = self._message()
        header = wire.encode(message)
        match random.choice(["bytes", "damage", "damage", "value", "value", "valid", "payload", "many", "empty"]):
            case "bytes":
                return [random.randbytes(random.randrange(200))]
            case "damage":
                header = mutated(random, [header, wire.encode(self._message()[0])])[:HEADER_BYTES]
            case "value":
                header = self._bent(message)
            case "payload":
                payload = random.choice([b"", b"\x00", random.randbytes(random.choice([3, 300, 70_000]))])
            case "many":
                return [header, *(random.randbytes(random.randrange(40)) for _ in range(random.randrange(2, 7)))]
            case "empty":
                return [b""] * random.randrange(1, 5)
        return [header] if payload is None else [header, payload]

    def _polite_frames(self):
        """Return what a device might say, though not now, or with other numbers."""
        random = self._random
        message, payload = random.choice(
            [self._push, self._push, self._announcement, self._piece, lambda: (self._small(), None)]
        )()
        header = wire.encode(message)
        return [header] if payload is None else [header, payload]

    def _bent(self, message):
        """Put a value where it does not belong, at any depth."""
        frame = [[PROTOCOL_VERSION, message.kind, msgpack.unpackb(wire.encode(message))[2], b""]]
        spots = [(parent, index) for parent in lists_in(frame) for index in range(len(parent))]
        parent, index = self._random.choice(spots)
        parent[index] = self._random.choice(NASTY_VALUES)
        return msgpack.packb(frame[0])

    def _message(self):
        """Return a message of any kind, with its payload."""
        random = self._random
        kind = random.choice(list(MESSAGES.values()))
        if kind is Push:
            return random.choice([self._push, self._announcement])()
        if kind is Piece:
            return self._piece()
        if kind in OF_A_DEVICE:
            return self._small(kind), None
        return random.choice(OF_A_HUB), None

    def _small(self, kind=None):
        random = self._random
        session = random.choice([self._session, self._session, random.randbytes(16)])
        match kind or random.choice([Hello, Fetch, Fetch, Credit, Credit, Ping, StatusRequest, Goodbye]):
            case message if message is Hello:
                return self._hello(random.choice([self._name, self._name, HONEST, f"new-{random.randrange(100)}"]))
            case message if message in (Fetch, FetchGraph):
                return message(session)
            case message if message is Credit:
                received = random.choice([0, 0, 64 << 10, MODEL.spec.nbytes, 2**53])
                return Credit(random.choice([self._transfer, self._transfer, 0, 2**53]), received)
            case message if message is Ping:
                return Ping(session, random.choice([0.0, math.nan, -math.inf, 1e308]), random.randrange(2**53))
            case message if message is Goodbye:
                return Goodbye(random.choice(["finished", "stopping"]), random.choice([session, None]))
        return StatusRequest()

    def _hello(self, name=None):
        random = self._random
        return Hello(
            device_id=name or self._name,
            state_id=random.choice([bytes(16), random.randbytes(16)]) if name else bytes(16),
            incarnation=random.randrange(3) if name else 1,
            session=random.choice([None, self._session]),
            seq_answered=random.choice([0, 0, 2**53]) if name else 0,
            fingerprint=random.choice([None, None, MODEL.spec.fingerprint, "0" * 32]) if name else None,
        )

    def _push(self):
        """A push with its payload: nothing learnt, or something that is not finite, or too short."""
        random = self._random
        length, codec = random.choice([(self._lengths[0], "identity"), (self._lengths[1], "float16")])
        payload = random.choice(
            [bytes(length), np.full(length // 4, np.nan, np.float32).tobytes(), random.randbytes(length), bytes(4)]
        )
        return self._push_header(payload, codec, transfer=0), payload

    def _announcement(self):
        """A push whose payload is to come in pieces; it may claim anything."""
        header = self._push_header(bytes(self._lengths[0]), "identity", transfer=self._seq + 1)
        if self._random.random() < 0.3:
            claim = self._random.choice([0, 1, 2**31, 2**53])
            header = msgspec.structs.replace(header, payload_bytes=claim)
        return header, None

    def _push_header(self, payload, codec, transfer):
        random = self._random
        return Push(
            session=self._session,
            seq=random.choice([self._seq + 1, self._seq + 1, max(1, self._seq), random.randrange(1, 2**53)]),
            base=random.choice(
                [
                    self._version,
                    self._version,
                    ModelVersion("f" * 16, 1),
                    ModelVersion(self._version.lineage, 2**53),
                ]
            ),
            local_steps=random.choice([1, 2**31]),
            examples=random.choice([0, 32, 2**53]),
            loss_mean=random.choice([0.5, math.nan, math.inf]),
            loss_variance=random.choice([0.5, math.nan, -1.0]),
            step_s=random.choice([0.0, 0.01, 1e9]),
            codec=codec,
            checksum=random.choice([wire.checksum(payload), wire.checksum(payload), 0]),
            payload_bytes=len(payload),
            transfer=transfer,
        )

    def _piece(self):
        random = self._random
        offset = random.choice([0, 0, 64 << 10, 2**53])
        length = random.choice([64 << 10, self._lengths[0] - (64 << 10), 1, 0])
        payload = bytes(length)
        return Piece(self._seq + 1, offset, random.choice([wire.checksum(payload), 7])), payload


class CountingAgent(AgentRuntime):
    """An honest agent that counts what it sends."""

    messages_sent = connections = 0

    def connect(self):
        self.connections += 1
        super().connect()

    def send(self, header, payload):
        self.messages_sent += 1
        super().send(header, payload)


class Asker:
    """Asks the hub for its status, and counts that too."""

    def __init__(self, address):
        self.asked = 0
        self._address = address

    async def status(self):
        self.asked += 1
        return await asyncio.to_thread(fetch_status, self._address, PATIENCE_S)

    async def honest_updates(self):
        devices = {device["id"]: device for device in (await self.status())["devices"]}
        return devices[HONEST]["updates_applied"] if HONEST in devices else 0

    async def trained(self, goal):
        deadline = time.monotonic() + PATIENCE_S
        while (updates := await self.honest_updates()) < goal:
            assert time.monotonic() < deadline, f"the honest agent has {updates} of {goal} updates"
            await asyncio.sleep(0.02)


def lists_in(value):
    """Return every list inside nested lists, `value` first."""
    return [value, *(inner for item in value if isinstance(item, list) for inner in lists_in(item))]


def pack(kind, fields, version=PROTOCOL_VERSION):
    return msgpack.packb([version, kind, fields, b""])


def honest_agent(address):
    generator = np.random.default_rng(0)
    data = Dataset.of(generator.normal(size=(200, 64)), generator.integers(0, 10, 200))
    return CountingAgent(
        *agent_parts(
            lambda welcome: read_plan(welcome.settings).make_trainer(data, 0),
            identity=DeviceIdentity(HONEST, "00c0ffee" * 4, 1),
            hub=address,
            examples=len(data),
        )
    )


async def test_a_live_hub_outlives_ten_thousand_messages_and_counts_them_all(tmp_path):
    with Commands(tmp_path) as commands:
        hub, address = commands.hub(commands.settings(model=MODEL_TABLE, more=SETTINGS))
        asker, agent = Asker(address), honest_agent(address)
        training = asyncio.create_task(agent.run())
        await asker.trained(5)
        before = await asker.honest_updates()

        attackers = [Attacker(address, number) for number in range(ATTACKERS)]
        await asyncio.gather(*(asyncio.to_thread(attacker.run) for attacker in attackers))
        thrown = sum(attacker.sent for attacker in attackers)
        assert thrown >= 10_000

        after = await asker.honest_updates()
        assert after > before, "no training during the flood"
        await asker.trained(after + 10)
        agent.request_stop()
        assert await training == "stopped"
        assert agent.connections == 1, "the honest agent lost its hub"
        hub.wait_for("left", device=HONEST)  # its last message

        status = await asker.status()
        accepted = status["messages_accepted"]
        too_often = sum(status["denied"].get(bound, 0) for bound in ("hellos", "status"))
        counted = sum(accepted.values()) + status["messages_refused"] + too_often
        assert counted == thrown + agent.messages_sent + asker.asked
        assert set(accepted) == {
            "hello", "fetch", "push", "piece", "credit", "ping", "goodbye", "statusrequest", "wake",
        }  # fmt: skip
        assert status["messages_refused"] > thrown // 4
        assert status["updates_rejected"] > 0
        assert status["duplicates"] > 0
        assert set().union(*(attacker.kinds_seen for attacker in attackers)) >= {
            "Welcome", "Assignment", "Credit", "Pong", "Status",
            "duplicate_device_id", "hub_full", "malformed", "model_mismatch", "protocol_version", "sequence",
            "unknown_session",
        }  # fmt: skip
        # An attacker may not hear of its quarantine: what it does not read in time is dropped.
        assert any(event["event"] == "quarantined" for event in hub.events)

        hub.signal(signal.SIGTERM)
        assert hub.wait() == 0
        assert hub.stderr == ""
        assert len(hub.events) == len(hub.lines), "something else than events on standard output"
        vector, version = load_model(tmp_path / "run-hub" / MODEL_FILE, MODEL.spec)
        assert version == status["version"]
        assert np.isfinite(vector).all()
