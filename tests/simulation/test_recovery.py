"""A hub that is killed resumes from its disk, to the bit where it was, whatever its policy and codecs are."""

import itertools

import numpy as np
import pytest

from edgeasync.core.hub.settings import FLOAT32, CheckpointSettings, CodecSettings, HubCoreSettings, Liveness
from edgeasync.core.recovery.state import dump_state
from edgeasync.data.dataset import Dataset, batches
from edgeasync.durable.checkpoint import CheckpointStore
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.recovery import Rules, open_checkpoint, recover
from edgeasync.durable.run_folder import RunFolder
from edgeasync.policies.aggregation import BufferedAggregator, ImmediateAggregator, ModelAverageAggregator
from edgeasync.policies.optimizers import SGD, Adam
from edgeasync.policies.policy import Policy, WarmUp
from edgeasync.protocol import wire
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import SoftmaxModel
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from tests.support.simulation.hubs import simulated_hub

MODEL = SoftmaxModel(inputs=6, classes=3)
WARM_UP = WarmUp(updates=10, aggregate=ModelAverageAggregator())
POLICIES = {
    "default": Policy(),
    "immediate": Policy(aggregate=ImmediateAggregator()),
    "buffered": Policy(aggregate=BufferedAggregator(count=2), optimizer=(Adam(),)),
    "models": Policy(
        aggregate=ModelAverageAggregator(), warm_up=WarmUp(updates=10, aggregate=ModelAverageAggregator())
    ),
}
CODECS = {
    "default": CodecSettings(),
    "float32": FLOAT32,
    "sparse": CodecSettings(push="top_k(0.2)+int8", delta="int8"),
}


class Bench:
    """A hub on a real folder with three devices, and what its core and model were after every entry."""

    def __init__(self, folder, policy, codec, **settings):
        self.clock = VirtualClock()
        self.disk = FolderDisk(folder)
        self.settings = HubCoreSettings(
            codec=codec,
            liveness=Liveness(heartbeat_s=0.5, lease_s=2.0),
            checkpoint=CheckpointSettings(**settings),
        )
        self.rules = Rules(MODEL.spec, policy, self.settings)
        self.written = {}
        self.vectors = {}
        initial = MODEL.initial(0)
        self.hub = simulated_hub(
            self.clock, MODEL.spec, policy, settings=self.settings, seed=1, disk=self.disk, initial=initial
        )
        self.watch()
        self.devices = [self._device(number) for number in range(3)]

    def _device(self, number):
        generator = np.random.default_rng(number)
        x = generator.normal(size=(40, 6)).astype(np.float32)
        y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
        trainer = GradientTrainer(
            MODEL.spec, MODEL.gradient, (SGD(learning_rate=0.1),), batches(Dataset(x, y), 8, seed=number)
        )
        link = LinkProfile(1e6, 1e6, 0.01)
        return SimulatedDevice(
            self.hub, f"device-{number}", trainer, step_s=0.01 * (number + 1), link=link, seed=number
        )

    def watch(self):
        """Note the state after every entry, and every version."""
        log, core, model = self.hub.log, self.hub.core, self.hub.engine.model
        append, advance = log.append, model.advance

        def noted(*appended):
            append(*appended)
            self.written[log.last] = dump_state(core)

        def kept(snapshot):
            advance(snapshot)
            self.vectors[snapshot.number] = wire.checksum(snapshot.vector.tobytes())

        log.append, model.advance = noted, kept

    def run(self, seconds):
        self.clock.run(lambda: False, self.clock.now_s + seconds)


# Whole models do not travel sparse.
PAIRS = [pair for pair in itertools.product(POLICIES, CODECS) if pair != ("models", "sparse")]


@pytest.mark.parametrize(("policy", "codec"), PAIRS)
def test_a_replay_is_the_same_after_every_entry(tmp_path, policy, codec):
    bench = Bench(tmp_path, POLICIES[policy], CODECS[codec], every="1000 hours")
    for device in bench.devices:
        device.start()
    bench.run(3.0)
    bench.devices[1].cut_power()
    bench.run(2.5)
    bench.devices[1].start()
    bench.run(1.0)
    bench.hub.crash()
    compared = []

    def compare(number, entry, effects):
        assert dump_state(replayed[0]) == bench.written[number], (number, entry)
        compared.append(number)
        return True

    replayed = []

    def make_core(*parts):
        replayed.append(bench.hub._make_core(*parts))
        return replayed[0]

    folder = RunFolder(disk=bench.disk)
    found = recover(folder, bench.rules, make_core, bench.hub._draw_session, on_entry=compare)
    assert len(compared) > 100
    assert found.core.version > 10
    vector = found.model.current.vector
    assert wire.checksum(vector.tobytes()) == bench.vectors[found.core.version]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hub_that_is_killed_goes_on(tmp_path, policy):
    bench = Bench(tmp_path, POLICIES[policy], CodecSettings(), every="2 seconds", journal_bytes_max=20_000)
    for device in bench.devices:
        device.start()
    for _ in range(5):
        bench.run(3.0)
        answered = [device.engine.core.work.updates_answered for device in bench.devices]
        before = bench.hub.core.updates_applied
        bench.hub.crash()
        bench.run(0.5)
        bench.hub.start()
        bench.watch()
        core = bench.hub.core
        assert core.updates_applied + core.updates_rejected + core.policy_engine.gathering.count >= sum(answered)
        assert core.updates_applied <= before
        core.check()
    bench.run(3.0)
    assert bench.hub.core.updates_applied > before
    more = [device.engine.core.work.updates_answered for device in bench.devices]
    assert all(later > earlier for later, earlier in zip(more, answered, strict=True))
    assert sum(bench.disk.size(name) for name in bench.disk.names() if name.startswith("journal")) < 200_000


@pytest.mark.parametrize("codec", ["default", "sparse"])
@pytest.mark.parametrize("policy", ["default", "immediate", "buffered"])
def test_a_checkpoint_has_what_devices_were_given_last(tmp_path, policy, codec):
    """Of the version that the event made which it is of, too."""
    bench = Bench(tmp_path, POLICIES[policy], CODECS[codec], every="3 updates")
    for device in bench.devices:
        device.start()
    store = CheckpointStore(bench.disk, 3)
    for _ in range(10):
        bench.run(0.3)
        chosen = store.choose("latest", MODEL.spec.fingerprint)
        found = open_checkpoint(chosen, bench.hub._make_core, bench.hub._draw_session)
        assert found.publisher.published.number == found.core.publish_schedule.state.number
    assert found.core.publish_schedule.state.number > 10
