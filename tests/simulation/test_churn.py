"""Fleets drawn by seed, and devices that come and go: what is promised of them, and exact repetition."""

import hashlib
import statistics

import numpy as np
import pytest

from edgeasync.core.hub.settings import HubCoreSettings, Liveness
from edgeasync.data.dataset import Dataset, batches
from edgeasync.policies.optimizers import SGD
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import SoftmaxModel
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.population import Churn, FleetProfile, draw_fleet, switch_off_and_on
from tests.support.simulation.hubs import simulated_hub


def test_a_fleet_has_the_promised_quantiles():
    profile = FleetProfile(devices=4000, step_s=0.02, stragglers=0.0)
    fleet = draw_fleet(profile, 1)
    low, median, high = np.quantile([device.step_s for device in fleet], [0.025, 0.5, 0.975])
    assert median == pytest.approx(0.02, rel=0.05)
    assert high / low == pytest.approx(10, rel=0.1)
    for rates in ([d.link.up_bytes_per_s for d in fleet], [d.link.down_bytes_per_s for d in fleet]):
        quantiles = np.quantile(rates, [0.0, 0.5, 1.0]) * 8e-6
        assert quantiles == pytest.approx([1.0, 50**0.5, 50.0], rel=0.1)
    delays = np.quantile([device.link.delay_s for device in fleet], [0.0, 0.5, 1.0])
    assert delays == pytest.approx([0.005, 0.0175, 0.030], rel=0.05)
    assert len({device.device_id for device in fleet}) == 4000


def test_a_fleet_repeats_by_its_seed_and_is_the_same_but_for_its_stragglers():
    fleet = draw_fleet(FleetProfile(), 1)
    assert fleet == draw_fleet(FleetProfile(), 1)
    assert fleet != draw_fleet(FleetProfile(), 2)
    without = draw_fleet(FleetProfile(stragglers=0.0), 1)
    slowdowns = [slow.step_s / fast.step_s for slow, fast in zip(fleet, without, strict=True)]
    assert sorted(slowdowns) == pytest.approx([1.0] * 18 + [30.0] * 2)
    equal = draw_fleet(FleetProfile(spread=1.0, stragglers=0.0, mbit_per_s=(8, 8), delay_s=(0.01, 0.01)), 1)
    assert {(device.step_s, device.link.delay_s) for device in equal} == {(0.01, 0.01)}


class Switch:
    """Something to switch off and on that keeps the times."""

    def __init__(self, clock):
        self.clock = clock
        self.running = True
        self.spells = {True: [], False: []}
        self._since_s = 0.0

    def start(self):
        self._turn(on=True)

    def cut_power(self):
        self._turn(on=False)

    def _turn(self, *, on):
        assert self.running != on
        self.spells[self.running].append(self.clock.now_s - self._since_s)
        self._since_s = self.clock.now_s
        self.running = on


def test_churn_has_the_promised_spells_and_ends_with_the_agent():
    clock = VirtualClock()
    switch = Switch(clock)
    switch_off_and_on(clock, switch, Churn(on_s=9.0, off_s=1.0), "1/device-1")
    clock.run(lambda: False, 30_000.0)
    on, off = switch.spells[True], switch.spells[False]
    assert statistics.fmean(on) == pytest.approx(9.0, rel=0.05)
    assert statistics.fmean(off) == pytest.approx(1.0, rel=0.05)
    assert statistics.median(on) == pytest.approx(9.0 * 0.693, rel=0.1)
    clock.run(lambda: switch.running, 31_000.0)
    switch.running = False
    turns = len(on) + len(off)
    clock.run(lambda: False, 32_000.0)
    assert len(on) + len(off) == turns


def train_under_churn(seed):
    generator = np.random.default_rng(0)
    model = SoftmaxModel(inputs=4, classes=3)
    clock = VirtualClock()
    settings = HubCoreSettings(liveness=Liveness(heartbeat_s=0.2, lease_s=0.5))
    hub = simulated_hub(clock, model, settings=settings, seed=seed)
    devices = []
    for drawn in draw_fleet(FleetProfile(devices=8), seed):
        data = Dataset.of(generator.normal(size=(32, 4)), generator.integers(0, 3, 32))
        trainer = GradientTrainer(model.spec, model.gradient, [SGD(learning_rate=0.1)], batches(data, 8, 0))
        device = SimulatedDevice(hub, drawn.device_id, trainer, step_s=drawn.step_s, link=drawn.link)
        device.start()
        switch_off_and_on(clock, device, Churn(on_s=1.0, off_s=0.5), f"{seed}/{drawn.device_id}")
        devices.append(device)
    for second in range(1, 13):
        clock.run(lambda: False, float(second))
        hub.core.check()
    return hub, devices


def test_a_fleet_under_churn_trains_on_and_counts_every_update_once():
    hub, devices = train_under_churn(1)
    assert all(device.starts > 5 for device in devices)
    events = [report.event for _, report in hub.reports]
    assert events.count("rejoined") == sum(device.starts - 1 for device in devices) + _spoke_again(hub)
    assert "left" not in events, "a power cut says no goodbye"
    assert hub.core.updates_applied > 200
    assert hub.core.updates_applied == sum(m.updates_applied for m in hub.core.members.members.values())


def _spoke_again(hub):
    return sum(report.detail == "sent a message again" for _, report in hub.reports)


def test_the_same_seed_gives_the_same_run_under_churn():
    def trace(seed):
        hub, devices = train_under_churn(seed)
        sent = [(device.starts, device.up.bytes_sent, device.down.bytes_sent) for device in devices]
        return hashlib.sha256(hub.model).hexdigest(), sent, hub.core.status(12.0), hub.reports

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)
