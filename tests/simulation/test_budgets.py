"""Limits of a day's bytes, in virtual time: kept, spent early, and remembered."""

import numpy as np
import pytest

from edgeasync.config import ByteCount
from edgeasync.core.hub.settings import DAY_S, HubCoreSettings, Limits, Liveness
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.policy import Policy
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.fleet import SimulatedDevice
from edgeasync.simulation.hub import SimulatedHub
from edgeasync.simulation.link import LinkProfile
from edgeasync.training.trainer import StepResult

SPEC = ParameterSpec((Parameter("w", (20_000,)),))
LIMIT = 1_500_000
LINK = LinkProfile(up_bytes_per_s=1e6, down_bytes_per_s=1e6, delay_s=0.02)
CALM = Liveness(heartbeat_s=60.0, lease_s=180.0)


class Learner:
    """A trainer whose loss falls for as long as `learns`."""

    spec = SPEC

    def __init__(self, seed):
        self.change = np.float32(1e-3 * (seed + 1))
        self.loss, self.learns = 1.0, True

    def begin(self, parameters):
        self.parameters = parameters

    def step(self):
        self.parameters[:100] += self.change
        self.loss *= 0.98 if self.learns else 1.0
        return StepResult(0.1 + self.loss, 32)


class Lab:
    """Four devices of a hub with limits."""

    def __init__(self, limits):
        self.clock = VirtualClock()
        self.hub = SimulatedHub(
            self.clock,
            spec=SPEC,
            initial=np.zeros(SPEC.length, np.float32),
            policy=Policy(),
            settings=HubCoreSettings(limits=limits, liveness=CALM),
            seed=1,
        )
        self.trainers = [Learner(number) for number in range(4)]
        self.devices = [
            SimulatedDevice(self.clock, self.hub, f"d{n}", trainer, step_s=0.05, link=LINK, examples=1000, seed=n)
            for n, trainer in enumerate(self.trainers)
        ]
        for device in self.devices:
            device.start()

    def until(self, now_s):
        self.clock.run(lambda: False, now_s)

    @property
    def sent(self):
        return [device.up.bytes_sent + device.down.bytes_sent for device in self.devices]

    def status(self):
        return self.hub.core.status(self.clock.now_s)


@pytest.mark.parametrize("key", ["device_bytes_per_day_max", "bytes_per_day_max"])
def test_a_days_bytes_are_spent_early_all_and_never_overdrawn(key):
    most = LIMIT if key.startswith("device") else 4 * LIMIT
    lab = Lab(Limits(**{key: ByteCount(most)}))
    lab.until(DAY_S / 4)
    early = sum(lab.sent)
    assert early > 0.5 * 4 * LIMIT
    lab.until(DAY_S - 1.0)
    first = lab.sent
    assert 0.9 * 4 * LIMIT <= sum(first) <= 4 * LIMIT
    if key.startswith("device"):
        assert max(first) <= LIMIT
    described = lab.status()
    assert all(device["rest_s"] >= 0.0 for device in described["devices"])
    assert {device["state"] for device in described["devices"]} == {"training"}, "who rests is not paused"
    lab.until(1.25 * DAY_S)
    assert sum(lab.sent) - sum(first) > 0.2 * 4 * LIMIT, "the next day has bytes of its own"


def test_bytes_are_kept_for_later_once_nothing_new_is_learnt():
    spent = []
    for learns in (True, False):
        lab = Lab(Limits(device_bytes_per_day_max=ByteCount(LIMIT)))
        for trainer in lab.trainers:
            trainer.learns, trainer.loss = learns, 1e6 if learns else 1.0
        lab.until(DAY_S / 4)
        spent.append(sum(lab.sent))
    assert spent[1] < 0.85 * spent[0]


def test_without_limits_nobody_rests():
    lab = Lab(Limits())
    lab.until(20.0)
    assert sum(lab.sent) > 4e6
    traffic = lab.status()["traffic"]
    assert traffic["bytes_up"] + traffic["bytes_down"] > 4e6
    assert (traffic["bytes_per_day_max"], traffic["day_left_bytes"]) == (None, None)
