"""Runs under several policies in virtual time, and digests of what a hub has of them: the same on every machine.

    PYTHONPATH=. python tests/support/boards/recovered.py write FOLDER
    PYTHONPATH=. python tests/support/boards/recovered.py read FOLDER

`write` lets a hub train for each policy, ends it as SIGKILL would, and prints digests of what it held then. `read`
recovers each run from its journal, and prints digests of that. It needs no test packages, so it runs on a device.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from edgeasync.core.hub.settings import FLOAT32, CheckpointSettings, CodecSettings, HubCoreSettings
from edgeasync.core.recovery.state import capture
from edgeasync.data.dataset import Dataset, batches
from edgeasync.durable.checkpoint import CheckpointStore
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.journal import JournalReading
from edgeasync.durable.recovery import Rules, open_checkpoint
from edgeasync.policies.aggregation import BufferedAggregator, ImmediateAggregator, ModelAverageAggregator
from edgeasync.policies.combining import CentredClipCombiner, MedianCombiner, TrimmedMeanCombiner
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.optimizers import SGD, Adam, ClipByGlobalNorm, Nesterov, WeightDecay
from edgeasync.policies.policy import Policy
from edgeasync.policies.schedules import CosineSchedule
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import MlpModel
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.hub import SimulatedHub
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload

MODEL = MlpModel(inputs=64, hidden=(96,), classes=10)
UPDATES = 60

FOUR = BufferedAggregator(count=4)
POLICIES = {
    "default": (Policy(), CodecSettings()),
    "trimmed-adam": (
        Policy(
            aggregate=FOUR,
            combine=TrimmedMeanCombiner(trim=0.2),
            optimizer=(ClipByGlobalNorm(norm=5.0), Adam(learning_rate=0.01), CosineSchedule(updates=50)),
        ),
        CodecSettings(push="int8(stochastic)"),
    ),
    "median-adam": (
        Policy(aggregate=FOUR, combine=MedianCombiner(), optimizer=(Adam(),)),
        CodecSettings(push="sign", delta="top_k(0.1)+int8", model="bfloat16"),
    ),
    "clipped": (
        Policy(
            combine=CentredClipCombiner(),
            optimizer=(
                Nesterov(learning_rate=0.5),
                CosineSchedule(updates=90),
                WeightDecay(rate=1e-3),
            ),
        ),
        CodecSettings(push="top_k(0.1)+int8", delta="int4"),
    ),
    "immediate": (
        Policy(
            aggregate=ImmediateAggregator(),
            optimizer=(SGD(learning_rate=0.5, momentum=0.7),),
            frequency=FixedFrequency(local_steps=5),
        ),
        CodecSettings(push="float16"),
    ),
    "averaged": (Policy(aggregate=ModelAverageAggregator(), optimizer=(SGD(),)), FLOAT32),
}


def write_run(folder):
    """Let four devices train under the policy of the folder's name; return digests of what the hub held then."""
    folder.mkdir(parents=True)
    clock = VirtualClock()
    policy, codec = POLICIES[folder.name]
    hub = SimulatedHub(
        clock,
        spec=MODEL.spec,
        initial=MODEL.initial(0),
        policy=policy,
        settings=HubCoreSettings(codec=codec, checkpoint=CheckpointSettings(every="10 hours")),
        seed=1,
        disk=FolderDisk(folder),
    )
    hub.start()
    for number in range(4):
        generator = np.random.default_rng(number)
        x = generator.normal(size=(200, 64)).astype(np.float32)
        data = batches(Dataset(x, x[:, :10].argmax(axis=1)), 16, seed=number)
        trainer = GradientTrainer(MODEL.spec, MODEL.gradient, (SGD(learning_rate=0.1),), data)
        link = LinkProfile(1e6, 1e6, 0.01)
        SimulatedDevice(
            hub,
            f"device-{number}",
            trainer,
            step_s=0.01 * (number + 1),
            link=link,
            workload=SimulatedWorkload(examples=200),
            seed=number,
        ).start()
    assert clock.run(lambda: hub.core.updates_applied >= UPDATES, 600.0)
    assert clock.run(lambda: hub.log.durable == hub.log.last and not hub.engine._fold_queue._waiting, 700.0)
    return digests(hub.engine.core, hub.engine.model, hub.engine._deliveries.publisher)


def read_run(folder):
    """Recover a run from its first checkpoint and its journal; return digests of what a hub would hold."""
    disk = FolderDisk(folder)
    store = CheckpointStore(disk, keep=1)
    known, _ = store.manifests()
    name, manifest = known[-1]
    found = open_checkpoint(store.choose(name, manifest.fingerprint), Rules.make_core, partial(bytes, 16))
    found.replay(JournalReading(disk, manifest.journal), lambda *_: True)
    return digests(found.core, found.model, found.publisher)


def digests(core, model, publisher):
    """Return a digest of each array of a hub's state; the scalars are an array of bytes there."""
    tensors = capture(core, model, publisher, 0, 0.0).tensors
    return {name: xxhash.xxh3_64_hexdigest(array.tobytes()) for name, array in tensors.items()}


def write(folder):
    """Write a run for each policy; return the digests by policy."""
    return {name: write_run(folder / name) for name in POLICIES}


def read(folder):
    """Recover the run of each policy; return the digests by policy."""
    return {name: read_run(folder / name) for name in POLICIES}


if __name__ == "__main__":
    work = {"write": write, "read": read}[sys.argv[1]]
    sys.stdout.write(json.dumps(work(Path(sys.argv[2])), indent=1) + "\n")
