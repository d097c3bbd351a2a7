"""Writes one example of everything durable, and of every message, as this version writes them.

    python -m tests.support.formats.write_formats

replaces `run/`, `device/` and `wire.json` in `tests/fixtures/formats`. Run it when you raise a format's number.
"""

import json
import shutil
import struct
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from edgeasync.core.arrays.spool import HeldModel, Spool
from edgeasync.core.device.data_quota import QuotaRecord
from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.device.pending_push import ModelKey
from edgeasync.core.device.throttle import ThrottleReadings, ThrottleSection
from edgeasync.core.engine.sender import Sender
from edgeasync.core.hub.settings import CheckpointSettings, HubCoreSettings, Liveness
from edgeasync.data.dataset import Dataset, batches
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.durable.local_file import LocalFile
from edgeasync.durable.quota_file import QuotaFile
from edgeasync.durable.run_folder import MODEL_FILE, RECORD_FILE
from edgeasync.durable.spool_file import SpoolFile
from edgeasync.graphs.model_file import save_model
from edgeasync.metrics import Accuracy, Meter
from edgeasync.policies.frequency import AdaptiveFrequency
from edgeasync.policies.monitor import Monitor, NotFiniteDetector, UpdateNormDetector
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import (
    MESSAGES,
    Ack,
    Assignment,
    Credit,
    Deltas,
    DeviceProfile,
    Duplicate,
    Enrol,
    Enrolled,
    Fetch,
    FetchGraph,
    FindPeers,
    FoundPeers,
    Frozen,
    Goodbye,
    GraphHeader,
    Hello,
    ListedPeer,
    ModelVersion,
    Order,
    Piece,
    Ping,
    Pong,
    Push,
    Refuse,
    Rejected,
    Status,
    StatusRequest,
    Wake,
    Welcome,
)
from edgeasync.runtime.hub_record import record_of
from edgeasync.runtime.hub_settings import HubSection, HubSettings
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub, WritingPace
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload

FOLDER = Path(__file__).parents[2] / "fixtures" / "formats"
EXPECTED_FILE = "expected.json"
"""What the hub that wrote a run held at the end, beside the run."""

MODEL = SoftmaxModel(inputs=3, classes=2)
POLICY = Policy(
    frequency=AdaptiveFrequency(period_steps_min=4, local_steps_max=64),
    monitor=Monitor(detectors=(NotFiniteDetector(count_max=2), UpdateNormDetector())),
)
CHECKPOINT = CheckpointSettings(every="12 updates", keep=2)
UPDATES, ORDERED_UPDATES = 20, 16
THROTTLE = ThrottleSection(temperature_c_max=80.0)

STATE_ID = "5" * 32
TIME = "2026-11-28T00:00:00+00:00"
LENGTH = struct.Struct("<Q")
SESSION = bytes(range(16))
VERSION = ModelVersion("00c0ffee00c0ffee", 41)
DAY = QuotaRecord(1_234_567, 43_210.5)
PROFILE = DeviceProfile("aarch64", 4, 1 << 30, 500, "edgeasync 0.1.0", 64, delay_steps=16)


class Diverging(GradientTrainer):
    """A trainer whose losses are NaN."""

    def step(self):
        return StepResult(float("nan"), super().step().examples)


class Wordless(GradientTrainer):
    """A trainer that tells no loss."""

    def step(self):
        return StepResult(None, super().step().examples)


def write_run(folder):
    """Write a run: a checkpoint, a journal behind it, an alarm, an operator's order, and an update that waits.

    The last device pauses as soon as it has joined.
    """
    folder.mkdir(parents=True)
    clock = VirtualClock()
    settings = HubCoreSettings(checkpoint=CHECKPOINT, liveness=Liveness(heartbeat_s=5.0, lease_s=15.0))
    hub = SimulatedHub(
        clock,
        spec=MODEL.spec,
        initial=MODEL.initial(0),
        policy=POLICY,
        settings=settings,
        seed=1,
        disk=FolderDisk(folder),
        writing=WritingPace(history_rows_max=1000),
    )
    hub.start()
    for number, kind in enumerate((GradientTrainer, Wordless, Diverging, GradientTrainer)):
        generator = np.random.default_rng(number)
        x = generator.normal(size=(40, 3)).astype(np.float32)
        data = batches(Dataset(x, (x[:, 0] > 0).astype(np.int64)), 8, seed=number)
        meter = Meter([Accuracy()])
        gradient = partial(MODEL.gradient, meter=meter)
        trainer = kind(MODEL.spec, gradient, (SGD(learning_rate=0.1),), data, meter=meter)
        link, step_s = LinkProfile(1e6, 1e6, 0.01), 0.01 * (number + 1)
        device = SimulatedDevice(
            hub,
            f"device-{number}",
            trainer,
            step_s=step_s,
            link=link,
            workload=SimulatedWorkload(examples=40, frozen=Frozen("torch", "f" * 32)),
            seed=number,
            limits=DeviceLimits(local_steps_max=64, delay_steps=2 if number == 3 else None),
            throttle=THROTTLE,
        )
        device.start()
    assert clock.run(lambda: device.engine.core.link == "joined", 1.0)
    device.sense(ThrottleReadings(temperature_c=85.0))
    core = hub.core
    assert clock.run(lambda: core.updates_applied >= ORDERED_UPDATES, 60.0)
    hub.connect(b"operator", lambda header, payload: None, Sender(bytes(32), "admin", "operator"))
    hub.receive(b"operator", wire.encode(Order("device-2", "quarantine")), None)
    assert clock.run(lambda: core.updates_applied >= UPDATES and core.policy_engine.gathering.count > 0, 60.0)
    clock.run(lambda: hub.log.durable == hub.log.last, clock.now_s + 1.0)
    settings = HubSettings(
        model=MODEL,
        hub=HubSection(bind="tcp://127.0.0.1:*", run="/runs/first", quiet=False),
        policy=POLICY,
        checkpoint=CHECKPOINT,
        liveness=settings.liveness,
    )
    (folder / RECORD_FILE).write_bytes(record_of(settings))
    save_model(folder / MODEL_FILE, MODEL.spec, hub.model, lineage=core.lineage, version=core.version)
    expected = {
        "version": core.version,
        "lineage": core.lineage,
        "model_xxh3": xxhash.xxh3_64_hexdigest(hub.model.data),
        "updates_applied": core.updates_applied,
        "updates_rejected": core.updates_rejected,
        "updates_buffered": core.policy_engine.gathering.count,
        "devices": {member.device_id: member.seq_last for member in core.members.members.values()},
        "alarms": list(core.policy_engine.state.divergence.devices),
        "excluded": [order.device_id for order in core.policy_engine.state.divergence.orders.values()],
    }
    (folder / EXPECTED_FILE).write_text(json.dumps(expected, indent=1) + "\n")


def make_spool():
    """Return what a device kept of an update that has no answer yet."""
    payload = bytes(range(40))
    push = Push(
        SESSION, 7, VERSION, 8, 64, 0.5, 0.25, 0.125, "int8", wire.checksum(payload), len(payload), overlap_steps=2
    )
    trainer = {"count": np.array([5]), "optimizer.0": np.ones(3, np.float32)}
    return Spool(ModelKey("a" * 32, None, "delta"), push, payload, np.array([0.5, -1.0, 2.0], np.float32), trainer)


def make_held():
    """Return the model that a device held."""
    values = np.array([0.5, -1.0, 2.0, 0.25], np.float32)
    return HeldModel(ModelKey("a" * 32, None, "delta"), VERSION, wire.checksum(values.data.cast("B")), values)


def make_local():
    """Return what a device keeps to itself."""
    return {"head.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "head.bias": np.array([-0.5], np.float32)}


def write_device(folder):
    """Write a device's state folder: `spool = "full"`, a limit of a day's bytes, local parameters."""
    folder.mkdir(parents=True)
    (folder / "identity.json").write_bytes(msgspec.json.encode(DeviceIdentity("device-1", STATE_ID, 3)))
    SpoolFile(folder, STATE_ID).write(make_spool())
    SpoolFile(folder, STATE_ID).write_model(make_held())
    QuotaFile(folder).write(DAY)
    LocalFile(folder, STATE_ID).write(make_local())


def make_messages():
    """Return one of every message, no field of it at its default where it has one."""
    ack = Ack(7, Duplicate(Rejected("behind", preempted=True)))
    return [
        Hello(
            "device-1", bytes.fromhex(STATE_ID), 3, SESSION, 6, PROFILE, ("identity", "int8"),
            "a" * 32, 1 << 18, "c" * 32, Frozen("torch", "d" * 32),
        ),
        Welcome(
            SESSION, MODEL.spec, {"local": {"batch_size": 8}}, 6, "int8", 5.0, 15.0, 1 << 20, "b" * 64, 4096,
            "model", "always", 0.5, 16, 93, 2, "e" * 64, 1 << 27,
        ),
        Fetch(SESSION, VERSION, 99, 95),
        Push(
            SESSION, 7, VERSION, 16, 512, None, None, 0.0625, "int8+zstd", 99, 12, 3, 0.75, 2, 0.625, 94,
            {"accuracy": 0.875, "top_5": 1.0}, 0.5,
        ),
        Ack(6, Rejected("quarantined")),
        Assignment(VERSION, 16, "int8", 99, 24, 3, ack, Deltas(40, (12, 12), 98, "float16"), "float16", 0.75),
        Piece(3, 1 << 20, 97),
        Credit(3, 1 << 20),
        Ping(SESSION, 12.5, 160, 0.25, 50, "76 C", 76.5, 1.75e9),
        Pong(12.5),
        Goodbye("stopping", SESSION),
        Refuse("busy", "the hub is busy; try again", 0.5, rest=True),
        StatusRequest(watches=True, events_after=12),
        Status(),
        FetchGraph(SESSION, base=True),
        GraphHeader("b" * 64, 96, 4096, 4),
        Enrol(bytes(range(32))),
        Enrolled("device-1"),
        Wake(),
        Order("device-1", "quarantine"),
        FindPeers("pi-1", "tcp://192.168.1.11:5600"),
        FoundPeers((ListedPeer("pi-1", "tcp://192.168.1.11:5600", bytes(range(32))),)),
    ]  # fmt: skip


def fields_of(message):
    """Return a message's fields as JSON has them; bytes in hexadecimal."""
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    return json.loads(json.dumps(fields, default=bytes.hex))


def settle(path):
    """Give a safetensors file one time, and one order of its texts: the library orders them at random."""
    content = path.read_bytes()
    (nbytes,) = LENGTH.unpack_from(content)
    header = json.loads(content[LENGTH.size : LENGTH.size + nbytes])
    texts = header.pop("__metadata__")
    texts |= {"time": TIME} if "time" in texts else {}
    encoded = json.dumps({"__metadata__": dict(sorted(texts.items()))} | header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(LENGTH.pack(len(encoded)) + encoded + content[LENGTH.size + nbytes :])


def write_wire(path):
    """Write every message as a header frame in hexadecimal, with what it says."""
    messages = make_messages()
    assert [type(message) for message in messages] == list(MESSAGES.values())
    lines = [
        {"message": type(message).__name__, "fields": fields_of(message), "header": wire.encode(message).hex()}
        for message in messages
    ]
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")


def write(folder):
    """Write all examples; they are the same at each time."""
    write_run(folder / "run")
    write_device(folder / "device")
    write_wire(folder / "wire.json")
    for path in (folder / "run" / MODEL_FILE, *folder.glob("device/*.safetensors")):
        settle(path)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    write(FOLDER)
