"""Devices that pause and slow down in virtual time: what a fleet does meanwhile, to the microsecond."""

import numpy as np
import pytest

from edgeasync.core.device.throttle import ThrottleReadings, ThrottleSection
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Liveness
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator, QuorumAggregator
from edgeasync.policies.frequency import FixedFrequency, TimeFrequency
from edgeasync.policies.monitor import Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.policies.staleness import ConstantStaleness
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from tests.support.simulation.adders import Adder
from tests.support.simulation.hubs import simulated_hub

SPEC = ParameterSpec((Parameter("w", (3,)),))
LINK = LinkProfile(1e9, 1e9, 0.0)
THROTTLE = ThrottleSection(temperature_c_max=80.0, temperature_c_slow=75.0)
STEP_S = 0.25


class Lab:
    """A hub, and devices of one speed."""

    def __init__(self, devices, **policy):
        self.clock = VirtualClock()
        self.hub = simulated_hub(
            self.clock,
            SPEC,
            Policy(
                staleness=ConstantStaleness(),
                optimizer=(SGD(),),
                monitor=Monitor(detectors=()),
                warm_up=None,
                **policy,
            ),
            settings=HubCoreSettings(codec=FLOAT32, liveness=Liveness(heartbeat_s=5.0, lease_s=15.0)),
        )
        self.devices = [
            SimulatedDevice(
                self.hub,
                f"d{number}",
                Adder(SPEC, 1.0),
                step_s=STEP_S,
                link=LINK,
                seed=number,
                throttle=THROTTLE,
            )
            for number in range(devices)
        ]
        for device in self.devices:
            device.start()

    @property
    def core(self):
        return self.hub.core

    def run(self, until_s):
        self.clock.run(lambda: False, until_s)

    def fold_times(self, until_s):
        """Return when versions were made until then."""
        found, versions = [], [self.core.version]
        while self.clock.run(lambda: self.core.version > versions[-1], until_s):
            versions.append(self.core.version)
            found.append(self.clock.now_s)
        return found

    def status(self, number):
        return self.core.status(self.clock.now_s)["devices"][number]


def test_a_quorum_of_three_does_not_wait_for_one_that_pauses():
    lab = Lab(3, aggregate=QuorumAggregator(share=1.0, patience=100.0), frequency=FixedFrequency(local_steps=4))
    before = lab.fold_times(5.5)
    assert np.diff(before) == pytest.approx(4 * STEP_S, abs=1e-5)
    lab.devices[2].sense(ThrottleReadings(temperature_c=85.0))
    paused_s = lab.clock.now_s
    during = lab.fold_times(paused_s + 20.0)
    assert np.diff([before[-1], *during]) == pytest.approx(4 * STEP_S, abs=1e-5), "no fold is late"
    assert lab.status(2)["state"] == "paused"
    assert lab.status(2)["pace_reason"] == "85 C"
    assert lab.devices[2].engine.core.link == "joined"
    lab.devices[2].sense(ThrottleReadings(temperature_c=69.0))
    lab.run(lab.clock.now_s + 10.0)
    assert lab.status(2)["state"] == "training"
    assert lab.status(2)["staleness"] <= 1, "it keeps up again"


def test_the_hub_knows_at_once_and_the_wait_is_no_time_of_the_link():
    lab = Lab(1, aggregate=ImmediateAggregator(), frequency=FixedFrequency(local_steps=4))
    lab.run(5.1)
    talk_s = lab.status(0)["talk_s"]
    lab.devices[0].sense(ThrottleReadings(temperature_c=81.0))
    lab.run(5.1 + 1e-3)
    assert (lab.status(0)["state"], lab.status(0)["temperature_c"]) == ("paused", 81.0)
    updates = lab.core.updates_applied
    lab.run(600.0)
    assert lab.core.updates_applied == updates
    lab.devices[0].sense(ThrottleReadings(temperature_c=60.0))
    lab.run(604.0)
    assert lab.core.updates_applied >= updates + 3
    assert lab.status(0)["talk_s"] == pytest.approx(talk_s, abs=1e-6)
    assert lab.status(0)["step_s"] == pytest.approx(STEP_S)


def test_a_slowed_device_gets_fewer_steps():
    lab = Lab(2, aggregate=ImmediateAggregator(), frequency=TimeFrequency(seconds=4.0))
    lab.run(60.0)
    assert [lab.status(number)["assigned_steps"] for number in (0, 1)] == [15, 15]
    lab.devices[1].sense(ThrottleReadings(temperature_c=76.0))
    lab.run(120.0)
    assert [lab.status(number)["assigned_steps"] for number in (0, 1)] == [15, 7]
    assert (lab.status(1)["state"], lab.status(1)["pace_percent"]) == ("training", 50)
