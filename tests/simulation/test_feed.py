"""A viewer that applies the feed's changes knows the same as one that is sent everything, whatever happens."""

import msgspec
import numpy as np
import pytest

from edgeasync.core.engine.feed import Feed
from edgeasync.core.hub.attention import find_attention
from edgeasync.core.hub.device_status import device_row
from edgeasync.core.hub.settings import HubCoreSettings, Limits, Liveness
from edgeasync.data.dataset import Dataset, batches
from edgeasync.policies.optimizers import SGD
from edgeasync.protocol.feed import FeedUpdate
from edgeasync.protocol.status import read_status
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import SoftmaxModel
from simulation.clock import VirtualClock
from simulation.disk import SimulatedDisk
from simulation.fleet import SimulatedDevice
from simulation.population import Churn, FleetProfile, draw_fleet, switch_off_and_on
from tests.support.parts.statuses import DAEMON
from tests.support.simulation.hubs import simulated_hub

DEVICES, PLACES = 9, 7
SECONDS = 16


class Source:
    """The feed's shell on a simulated hub."""

    def __init__(self, hub):
        self.after, self.now_s, self.wall_s = hub.after, hub._now_s, hub.wall_s

    def describe(self):
        return DAEMON

    def pending_keys(self):
        return None


class Viewer:
    """Knows of a fleet what the feed has sent, and asks for more as soon as it comes."""

    def __init__(self, feed):
        self.feed = feed
        self.rows = {}
        self.number = self.wholes = 0
        self.newest = None
        feed.whole(self.hear)

    def hear(self, text):
        for line in text.split(b"\n"):
            update = msgspec.json.decode(line, type=FeedUpdate)
            if update.previous == 0:
                self.rows = {}
                self.wholes += 1
            else:
                assert update.previous == self.number
            self.rows |= {row.id: row for row in update.devices}
            for name in update.gone:
                del self.rows[name]
            self.number, self.newest = update.number, update
        self.feed.after(self.number, self.hear)


def run(seed, disk=None):
    """Let devices come and go for a while, with orders, evictions and rollbacks; return hub and viewer."""
    generator, model, clock = np.random.default_rng(seed), SoftmaxModel(inputs=4, classes=3), VirtualClock()
    settings = HubCoreSettings(liveness=Liveness(heartbeat_s=0.2, lease_s=0.5), limits=Limits(devices_max=PLACES))
    hub = simulated_hub(clock, model, settings=settings, seed=seed, disk=disk)
    viewer = Viewer(Feed(hub.engine, Source(hub)))
    for number, drawn in enumerate(draw_fleet(FleetProfile(devices=DEVICES), seed)):
        scale = 1e3 if number == 0 else 1.0
        data = Dataset.of(scale * generator.normal(size=(32, 4)), generator.integers(0, 3, 32))
        trainer = GradientTrainer(model.spec, model.gradient, [SGD(learning_rate=0.1)], batches(data, 8, 0))
        device = SimulatedDevice(hub, drawn.device_id, trainer, step_s=drawn.step_s, link=drawn.link)
        device.start()
        switch_off_and_on(clock, device, Churn(on_s=2.0, off_s=1.0), f"{seed}/{drawn.device_id}")
    for second in range(1, SECONDS):
        clock.run(lambda: False, float(second))
        known = [*hub.core.members.members]
        hub.order(known[second % len(known)], "release" if second % 3 else "quarantine")
    clock.run(lambda: not viewer.feed._drafting, SECONDS + 10.0)
    return hub, viewer


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_viewer_that_applies_changes_knows_what_the_hub_knows(seed, durable):
    hub, viewer = run(seed, SimulatedDisk(seed) if durable else None)
    assert (viewer.wholes, viewer.number) == (1, pytest.approx(SECONDS, abs=2))
    core, now_s = hub.core, hub._now_s()
    unseen = set(core.members.changes.take(1000))
    truth = {one.id: one for one in core.describe_devices(core.members.members.values(), now_s)}
    assert viewer.rows.keys() - unseen == truth.keys() - unseen
    for name in truth.keys() - unseen:
        assert viewer.rows[name] == device_row(truth[name], hub.wall_s())
    assert viewer.newest.counts == {
        state: sum(row.state == state for row in viewer.rows.values())
        for state in {row.state for row in viewer.rows.values()}
    }
    needs = find_attention(read_status(core.status(now_s) | DAEMON))
    shown = {one.device for one in viewer.newest.attention}
    by_time_or_median = ("stuck", "slow", "slow_link")
    assert {one.device for one in needs if one.reason not in by_time_or_median} <= shown | unseen
    assert shown <= viewer.rows.keys() | viewer.newest.summary.refused.keys()
