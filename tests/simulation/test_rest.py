"""A quiet hub in virtual time: its fleet rests once it has learnt, keeps its leases, and wakes at a word."""

import numpy as np

from benchmarks import rest_fleet
from benchmarks.rest_fleet import Case
from edgeasync.core.hub.settings import CheckpointSettings, HubCoreSettings
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Wake
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.disk import SimulatedDisk
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload
from tests.support.simulation.hubs import simulated_hub

REST_S = 4200.0
"""The fleet rests at nearly its longest period by then."""


def test_a_fleet_that_has_learnt_rests_and_wakes_at_an_operators_word():
    run = rest_fleet._Run(Case(1))
    run.clock.run(lambda: False, REST_S)
    core = run.hub.core
    assert run.resting
    assert run.accuracy(run.held_out) > 0.95
    cadence = core.status(run.clock.now_s)["cadence"]
    assert cadence["resting"]
    assert cadence["rest_period_s"] > 300.0
    assert cadence["still_s"] > 1200.0
    assert {device["state"] for device in core.status(run.clock.now_s)["devices"]} == {"training"}
    updates = core.updates_applied
    run.clock.run(lambda: False, REST_S + 2 * cadence["rest_period_s"])
    assert core.updates_applied - updates <= 3 * len(run.devices)
    begun_s, updates = run.clock.now_s, core.updates_applied
    told = []
    run.hub.connect(b"operator", lambda header, payload: told.append((wire.decode(header), payload)))
    run.hub.receive(b"operator", wire.encode(Wake()), None)
    assert b'"rest_cause":"an operator requested it"' in bytes(told[0][1])
    run.clock.run(lambda: False, begun_s + 30.0)
    assert core.updates_applied - updates >= 5 * len(run.devices)
    names = [report.event for _, report in run.hub.reports]
    assert "lost" not in names
    assert "paused" not in names
    assert names.index("resting") < names.index("awake")
    rests = [report.detail for _, report in run.devices[0].told if report.event == "resting"]
    assert rests
    assert all(detail.endswith(" s: training has plateaued") for detail in rests)
    core.check()


class Noise:
    """A trainer that learns nothing."""

    spec = ParameterSpec((Parameter("w", (4,)),))

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def begin(self, parameters):
        self.parameters = parameters

    def step(self):
        self.parameters += self.random.normal(size=4).astype(np.float32) * np.float32(1e-7)
        return StepResult(1.0, 1)


def test_a_hub_that_dies_after_it_was_woken_resumes_awake():
    clock, steps_s = VirtualClock(), (0.2, 0.4, 0.9, 1.5)
    settings = HubCoreSettings(quiet=True, checkpoint=CheckpointSettings(every="1000 hours"))
    hub = simulated_hub(clock, Noise.spec, seed=1, disk=SimulatedDisk(), settings=settings)
    for number, step_s in enumerate(steps_s):
        link = LinkProfile(up_bytes_per_s=1e6, down_bytes_per_s=1e6, delay_s=0.01)
        SimulatedDevice(
            hub,
            f"d{number}",
            Noise(number),
            step_s=step_s,
            link=link,
            workload=SimulatedWorkload(examples=100),
            seed=number,
        ).start()
    clock.run(lambda: False, 3000.0)
    assert hub.core.status(3000.0)["cadence"]["resting"]
    hub.connect(b"operator", lambda header, payload: None)
    hub.receive(b"operator", wire.encode(Wake()), None)
    clock.run(lambda: False, 3030.0)
    before, state = hub.core.version, repr(hub.core.policy_engine.pacing.rest.state)
    assert "an operator requested it" in state
    hub.crash("kept")
    hub.start()
    assert (hub.core.version, repr(hub.core.policy_engine.pacing.rest.state)) == (before, state)


def test_a_device_that_exchanges_while_the_others_rest_counts_as_one_of_all():
    run = rest_fleet._Run(Case(2))
    run.clock.run(lambda: False, REST_S)
    engine = run.hub.core.policy_engine
    engine._members.members["device-1"].measurements.roused = 3
    before, weights = run.hub.core.version, []
    share = engine.gathering._share_of_voters
    engine.gathering._share_of_voters = lambda contributions: weights.append(share(contributions)) or weights[-1]
    run.clock.run(lambda: run.hub.core.version >= before + 4, REST_S + 1300.0)
    assert min(weights) <= 0.5
    assert np.isfinite(run.hub.model).all()
