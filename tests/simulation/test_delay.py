"""Answers that are used a given number of steps after they were asked for, in virtual time."""

import numpy as np
import pytest

from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Liveness
from edgeasync.durable.disk import FolderDisk
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.aggregation import ImmediateAggregator, QuorumAggregator
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Push
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from tests.support.parts.small_runs import in_full
from tests.support.programs.journals import pushes_in
from tests.support.simulation.hubs import simulated_hub

SPEC = ParameterSpec((Parameter("w", (1000,)),))
QUICK = LinkProfile(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, delay_s=0.001)
SLOW = LinkProfile(up_bytes_per_s=4000.0, down_bytes_per_s=4000.0, delay_s=0.1)
K_AND_D = [(1, 0), (1, 1), (10, 0), (10, 1), (10, 10), (100, 0), (100, 50)]


class Adder:
    """A trainer that adds the step's number to every parameter, and notes at which step it was given a model."""

    spec = SPEC

    def __init__(self):
        self.steps = 0
        self.given_at = []

    def begin(self, parameters):
        self._parameters = parameters
        self.given_at.append(self.steps)

    def step(self):
        self.steps += 1
        self._parameters += float(self.steps)
        return StepResult(loss=0.0, examples=1)


class Device(SimulatedDevice):
    """A device that notes its updates, and after how many steps each left."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.pushes, self.sent_at = {}, {}

    def send(self, header, payload):
        super().send(header, payload)
        if isinstance(message := wire.decode(header), Push):
            self.pushes.setdefault(message.seq, message)
            self.sent_at.setdefault(message.seq, self.training.trainer.steps)


def fleet(steps, delay, *, aggregate=None, link=QUICK, devices=1, step_s=0.05, own=False, disk=None):
    """A hub and its devices, who say themselves when they use an answer if they are on their `own`."""
    clock = VirtualClock()
    hub = simulated_hub(
        clock,
        SPEC,
        in_full(steps, aggregate, delay_steps=0 if own else delay),
        settings=HubCoreSettings(codec=FLOAT32, liveness=Liveness(heartbeat_s=1.0, lease_s=15.0)),
        disk=disk,
    )
    limits = DeviceLimits(delay_steps=delay, local_steps_max=steps) if own else None
    members = [
        Device(hub, f"pi-{number}", Adder(), step_s=step_s * (1 + number), link=link, seed=number, limits=limits)
        for number in range(devices)
    ]
    for device in members:
        device.start()
    return clock, hub, members


def check_times(device, steps, delay):
    """Every update has its steps, and every answer was used the delay after its update."""
    updates = len(device.pushes)
    assert updates >= 5
    assert [push.local_steps for push in device.pushes.values()] == [steps] * updates
    assert [push.overlap_steps for push in device.pushes.values()] == [0] + [delay] * (updates - 1)
    assert list(device.sent_at.values()) == [steps * (number + 1) for number in range(updates)]
    used = device.training.trainer.given_at[1:]
    assert used == [steps * (number + 1) + delay for number in range(len(used))]


def learnt(hub):
    """What the updates of ten steps that the hub has counted add up to."""
    steps = 10 * hub.core.members.members["pi-0"].seq_last
    return steps * (steps + 1) / 2


@pytest.mark.parametrize(("steps", "delay"), K_AND_D)
@pytest.mark.parametrize("aggregate", [ImmediateAggregator(), QuorumAggregator()], ids=["immediate", "quorum"])
@pytest.mark.parametrize("link", [QUICK, SLOW], ids=["quick", "slow"])
def test_an_answer_is_used_exactly_the_delay_after_its_update(steps, delay, aggregate, link):
    """On the slow link an exchange takes 2 s, up to 40 steps: a device whose answer is not there waits for it."""
    clock, _, devices = fleet(steps, delay, aggregate=aggregate, link=link, devices=3)
    assert clock.run(lambda: all(len(device.pushes) >= 6 for device in devices), 4000.0)
    for device in devices:
        check_times(device, steps, delay)


@pytest.mark.parametrize(("steps", "delay"), K_AND_D)
def test_the_journal_shows_the_delay_that_a_device_says_itself(steps, delay, tmp_path):
    clock, hub, devices = fleet(steps, delay, link=SLOW, devices=2, own=True, disk=FolderDisk(tmp_path))
    assert clock.run(lambda: all(len(device.pushes) >= 6 for device in devices), 4000.0)
    for device in devices:
        check_times(device, steps, delay)
    clock.run(lambda: hub.log.durable == hub.log.last, clock.now_s + 1.0)
    pushes = [push for push in pushes_in(tmp_path) if push.seq > 1]
    assert len(pushes) >= 8
    assert {(push.local_steps, push.overlap_steps) for push in pushes} == {(steps, delay)}
    norms = len(hub.core.policy_engine.state.fleet.lengths)
    assert norms == 2, "updates of a delay that was told are compared with others"


def test_a_device_waits_although_the_hub_allows_overlap():
    clock, hub, _ = fleet(10, 4)
    waiting = Device(hub, "waits", Adder(), step_s=0.05, link=QUICK, seed=9, limits=DeviceLimits(delay_steps=0))
    waiting.start()
    assert clock.run(lambda: len(waiting.pushes) >= 6, 400.0)
    check_times(waiting, 10, 0)


def test_an_answer_is_used_before_the_next_update_leaves():
    """A device that may take only 3 steps uses each answer after 3, though the hub says 8."""
    clock, hub, _ = fleet(10, 8)
    limited = Device(
        hub, "limited", Adder(), step_s=0.05, link=SLOW, seed=9, limits=DeviceLimits(local_steps_max=3)
    )
    limited.start()
    assert clock.run(lambda: len(limited.pushes) >= 8, 400.0)
    check_times(limited, 3, 3)


def test_what_is_learnt_during_the_delay_counts_once():
    clock, hub, (device,) = fleet(10, 4)
    assert clock.run(lambda: device.engine.core.work.updates_answered >= 50, 4000.0)
    assert np.array_equal(hub.model, np.full(1000, learnt(hub), np.float32))


def test_a_long_delay_hides_a_slow_link():
    """With d = 0 a device waits 2 s for each answer; with 80 steps of 50 ms behind an update it never waits."""
    finished = {}
    for delay in (0, 80):
        clock, _, (device,) = fleet(100, delay, link=SLOW)
        assert clock.run(lambda device=device: len(device.pushes) >= 21, 4000.0)
        finished[delay] = clock.now_s
    assert finished[80] < 21 * 100 * 0.05 + 5.0
    assert finished[0] > finished[80] + 20 * 1.9


def test_a_device_that_starts_again_uses_the_answer_at_once():
    clock, _, (device,) = fleet(10, 4)
    assert clock.run(lambda: len(device.pushes) >= 3, 400.0)
    device.cut_power()
    device.start()
    assert clock.run(lambda: len(device.pushes) >= 8, 400.0)


@pytest.mark.parametrize("during", ["steps", "answer"])
def test_a_link_that_breaks_during_the_delay_loses_nothing(during):
    clock, hub, (device,) = fleet(10, 6, link=SLOW)
    state = {"steps": "pushing", "answer": "installing"}[during]
    for number in range(2, 8):
        assert clock.run(
            lambda number=number: len(device.pushes) >= number and device.engine.core.work.state == state, 400.0
        )
        device.break_connection()
    assert clock.run(lambda: device.engine.core.work.updates_answered >= 12, 4000.0)
    assert np.array_equal(hub.model, np.full(1000, learnt(hub), np.float32))
    check_times(device, 10, 6)
