"""Planted divergence in virtual time: noticed soon and explained; bounded or excluded, it costs no target."""

from functools import cache

import msgspec
import numpy as np
import pytest

from edgeasync.core.arrays.hub_model import Snapshot
from edgeasync.data import load_digits
from edgeasync.data.dataset import Dataset, batches
from edgeasync.data.partition import dirichlet, iid
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import FixedFrequency
from edgeasync.policies.monitor import LossDetector, Monitor
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Order, Status
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload
from tests.support.simulation.hubs import simulated_hub
from tests.support.size import repetitions

NETWORK = MlpModel(inputs=64, hidden=(64,), classes=10)
LEARNING_RATE = 0.05
TOO_HIGH = 100.0
TARGET = 0.95
UPDATES = 700
"""What training is given to reach the target: a fleet without a fault needs some 500."""

BEFORE_FAULTS = 100
"""Updates that are applied before the faults are planted."""

LIMIT_S = 600.0
POLICIES = {"default": Policy(), "immediate": Policy(aggregate=ImmediateAggregator())}

both_policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@cache
def digits():
    """Digits to train on, and others to judge by."""
    dataset = load_digits()
    order = np.random.default_rng(0).permutation(len(dataset))
    return dataset.take(order[360:]), dataset.take(order[:360])


def trainer_on(data, learning_rate, seed):
    return GradientTrainer(
        NETWORK.spec, NETWORK.gradient, [SGD(learning_rate=learning_rate)], batches(data, 32, seed)
    )


class Elsewhere:
    """Trains as another trainer does, but reports its losses on a scale of its own."""

    def __init__(self, trainer, scale):
        self.trainer, self.scale, self.spec = trainer, scale, trainer.spec

    def begin(self, parameters):
        self.trainer.begin(parameters)

    def step(self):
        result = self.trainer.step()
        return msgspec.structs.replace(result, loss=self.scale * result.loss)


class Wordless:
    """Trains as another trainer does, and tells no loss."""

    def __init__(self, trainer):
        self.trainer, self.spec = trainer, trainer.spec

    def begin(self, parameters):
        self.trainer.begin(parameters)

    def step(self):
        return StepResult(None, self.trainer.step().examples)


class Spoiler:
    """Learns nothing, and moves the parameters by the same noise with every step."""

    def __init__(self, deviation):
        self.spec = NETWORK.spec
        self.noise = np.random.default_rng(0).normal(0.0, deviation, self.spec.length).astype(np.float32)

    def begin(self, parameters):
        self.parameters = parameters

    def step(self):
        self.parameters += self.noise
        return StepResult(1.0, 32)


class Fleet:
    """A hub and nearly equal devices on parts of the digits, independent and alike unless `alpha` skews them.

    The first `started` of them are switched on.
    """

    def __init__(self, policy, *, devices=8, alpha=None, learning_rate=LEARNING_RATE, seed=0, started=None):
        data, self.held_out = digits()
        self.parts = (
            iid(data, devices, seed) if alpha is None else dirichlet(data, devices, alpha, seed, examples_min=16)
        )
        self.clock = VirtualClock()
        self.hub = simulated_hub(self.clock, NETWORK, policy, seed=seed, initial=NETWORK.initial(seed))
        self.devices = [
            SimulatedDevice(
                self.hub,
                f"device-{number}",
                trainer_on(part, learning_rate, 100 * seed + number),
                step_s=0.01 * (1.0 + 0.01 * number),
                link=LinkProfile(delay_s=0.005),
                workload=SimulatedWorkload(examples=len(part)),
                seed=seed,
            )
            for number, part in enumerate(self.parts, start=1)
        ]
        for device in self.devices[:started]:
            device.start()

    @property
    def core(self):
        return self.hub.core

    @property
    def updates(self):
        """Updates that came in, whatever became of them."""
        return self.core.updates_applied + self.core.updates_rejected + self.core.policy_engine.gathering.count

    def train(self, updates, limit_s=LIMIT_S):
        done = self.clock.run(lambda: self.core.updates_applied >= updates, self.clock.now_s + limit_s)
        self.core.check()
        return done

    def plant_faults(self, too_high=TOO_HIGH):
        """From their next local step on `device-1` learns far too fast, and all that `device-2` sees is NaN."""
        self.devices[0].training.trainer = trainer_on(self.parts[0], too_high, 1)
        nothing = np.full_like(self.parts[1].x, np.nan)
        self.devices[1].training.trainer = trainer_on(Dataset(nothing, self.parts[1].y), LEARNING_RATE, 2)

    def order(self, order, name):
        """Give an operator's order; return what the hub answers."""
        told = []
        self.hub.connect(b"operator", lambda header, payload: told.append(wire.decode(header)))
        self.hub.receive(b"operator", wire.encode(Order(name, order)), None)
        return told[0]

    def alarms(self, event="alarm"):
        return [report for _, report in self.hub.reports if report.event == event]

    def accuracy(self):
        return float((NETWORK.predict(self.hub.model, self.held_out.x) == self.held_out.y).mean())


@both_policies
def test_a_fault_is_noticed_and_explained_and_the_target_is_reached(policy):
    fleet = Fleet(policy)
    assert fleet.train(BEFORE_FAULTS)
    fleet.plant_faults()
    histories = fleet.core.members.measurements
    before = {name: histories[name].updates for name in ("device-1", "device-2")}
    noticed = {}

    def look():
        for name, count in before.items():
            if any(report.device_id == name for report in fleet.alarms()):
                noticed.setdefault(name, histories[name].updates - count)
        return len(noticed) == len(before)

    assert fleet.clock.run(look, LIMIT_S)
    # Its own updates since the fault; one more may have been in flight.
    assert noticed["device-1"] <= 4
    assert noticed["device-2"] <= 4

    words = {"device-1": "times as long as usual", "device-2": "not finite"}
    told = {report.device_id: report for report in fleet.alarms()}
    shown = {alarm["device"]: alarm for alarm in fleet.core.status(0.0)["alarms"]}
    assert set(told) == set(shown) == set(before)
    for name, cause in words.items():
        assert cause in told[name].detail
        assert told[name].detail.endswith(f"to exclude it, run 'edgeasync device quarantine {name}'")
        assert cause in shown[name]["cause"]
        assert shown[name]["remedy"] == "alert"
    assert told["device-1"].figures["times_usual"] > 4
    assert told["device-1"].figures["updates"] == 3

    assert fleet.train(UPDATES)
    assert fleet.accuracy() >= TARGET
    assert np.isfinite(fleet.hub.model).all()
    rejected = {name: member.updates_rejected for name, member in fleet.core.members.members.items()}
    unusable = rejected.pop("device-2")
    assert set(unusable) == {"not_finite"}
    assert set(map(str, rejected.values())) == {"{}"}, "what can be used counts"
    assert {device["state"] for device in fleet.core.status(0.0)["devices"]} == {"training"}
    assert not any(told.event == "quarantined" for device in fleet.devices for _, told in device.told)
    assert {alarm["device"] for alarm in fleet.core.status(0.0)["alarms"]} == set(before), "it lasts"
    assert fleet.alarms("calm") == []
    assert {report.device_id for report in fleet.alarms()} == set(before), "nobody else is blamed"


@both_policies
def test_without_a_monitor_the_same_faults_spoil_the_model(policy):
    fleet = Fleet(Policy(aggregate=policy.aggregate, monitor=Monitor(detectors=(), clip=0)))
    assert fleet.train(BEFORE_FAULTS)
    fleet.plant_faults()
    fleet.train(UPDATES)
    assert fleet.alarms() == []
    assert fleet.accuracy() < 0.5


def test_the_alarm_about_a_device_that_is_mended_ends():
    fleet = Fleet(Policy())
    assert fleet.train(BEFORE_FAULTS)
    fleet.plant_faults()
    assert fleet.train(2 * BEFORE_FAULTS)
    names = {"device-1", "device-2"}
    assert {alarm["device"] for alarm in fleet.core.status(0.0)["alarms"]} == names
    for number in (0, 1):
        fleet.devices[number].training.trainer = trainer_on(fleet.parts[number], LEARNING_RATE, number)
    members = fleet.core.members.members
    counted = {name: members[name].updates_applied for name in names}
    assert fleet.train(4 * BEFORE_FAULTS)
    status = fleet.core.status(fleet.clock.now_s)
    assert status["alarms"] == []
    assert {report.device_id for report in fleet.alarms("calm")} == names
    assert {past["device"] for past in status["alarms_past"]} == names
    assert all(past["duration_s"] > 0 < past["ended_ago_s"] for past in status["alarms_past"])
    assert all(members[name].updates_applied > count for name, count in counted.items())


@both_policies
def test_the_order_that_an_alarm_proposes_excludes_the_device_until_it_is_released(policy):
    fleet = Fleet(policy)
    assert fleet.train(BEFORE_FAULTS)
    fleet.plant_faults()
    assert fleet.clock.run(lambda: len(fleet.core.status(0.0)["alarms"]) == 2, LIMIT_S)
    member = fleet.core.members.members["device-1"]
    for _ in range(2):
        assert fleet.order("quarantine", "device-1") == Status()
    assert len(fleet.alarms("excluded")) == 1, "done once"
    counted = member.updates_applied
    assert fleet.train(UPDATES)
    assert member.updates_applied == counted
    assert set(member.updates_rejected) == {"quarantined"}
    assert fleet.accuracy() >= TARGET
    (shown,) = [one for one in fleet.core.status(0.0)["devices"] if one["state"] == "quarantined"]
    assert shown["id"] == "device-1"
    assert "edgeasync device release device-1" in shown["quarantine"]["ends"]
    fleet.devices[0].training.trainer = trainer_on(fleet.parts[0], LEARNING_RATE, 0)
    fleet.clock.run(lambda: False, fleet.clock.now_s + 2.0)
    assert member.updates_applied == counted, "no calm update ends an order"
    assert fleet.order("release", "device-1") == Status()
    assert fleet.train(2 * UPDATES)
    assert member.updates_applied > counted
    told = [report.event for _, report in fleet.devices[0].told if report.event in ("quarantined", "released")]
    assert told == ["quarantined", "released"]


def test_an_order_and_an_alarm_outlive_a_device_that_starts_again():
    fleet = Fleet(Policy())
    assert fleet.train(BEFORE_FAULTS)
    fleet.plant_faults()
    assert fleet.clock.run(lambda: len(fleet.core.status(0.0)["alarms"]) == 2, LIMIT_S)
    fleet.order("quarantine", "device-1")
    begun = {alarm["device"]: alarm["since_s"] for alarm in fleet.core.status(0.0)["alarms"]}
    counted = fleet.core.members.members["device-1"].updates_applied
    for device in fleet.devices[:2]:
        device.cut_power()
    fleet.clock.run(lambda: False, fleet.clock.now_s + 120.0)
    lost = {one["id"]: one["state"] for one in fleet.core.status(0.0)["devices"]}
    assert (lost["device-1"], lost["device-2"]) == ("quarantined", "lost")
    for device in fleet.devices[:2]:
        device.start()
    assert fleet.train(fleet.core.updates_applied + BEFORE_FAULTS)
    assert {alarm["device"]: alarm["since_s"] for alarm in fleet.core.status(0.0)["alarms"]} == begun
    assert fleet.core.members.members["device-1"].updates_applied == counted


@pytest.mark.parametrize("seed", range(repetitions("fleets that stay calm")))
@pytest.mark.parametrize("alpha", [None, 0.3], ids=["IID", "Dirichlet 0.3"])
def test_a_calm_fleet_sees_no_warning_and_no_rollback(alpha, seed):
    fleet = Fleet(Policy(), devices=20, alpha=alpha, seed=seed)
    assert fleet.train(UPDATES)
    assert [report for report in fleet.alarms() if report.device_id] == []
    assert fleet.core.policy_engine.state.divergence.rollbacks == fleet.core.updates_rejected == 0


def test_a_loss_that_explodes_takes_the_model_back_and_it_recovers():
    fleet = Fleet(Policy(monitor=Monitor(detectors=(LossDetector(),))))
    assert fleet.train(BEFORE_FAULTS)
    before = fleet.accuracy()
    model = fleet.hub.engine.model
    noise = np.random.default_rng(0).normal(0.0, 0.6, NETWORK.spec.length).astype(np.float32)
    model.advance(Snapshot(model.current.number, model.current.vector + noise))
    assert fleet.accuracy() < before - 0.4
    assert fleet.clock.run(lambda: fleet.core.policy_engine.state.divergence.rollbacks, LIMIT_S)
    assert any("rolled back to a version from before the alarm" in report.detail for report in fleet.alarms())
    assert fleet.accuracy() > before - 0.4
    assert fleet.train(UPDATES)
    assert fleet.accuracy() >= TARGET
    assert fleet.core.policy_engine.state.fleet.loss < 0.25
    assert fleet.core.status(0.0)["alarms"] == []


@both_policies
@pytest.mark.parametrize("too_high", [3.0, TOO_HIGH])
def test_a_fault_from_the_start_spoils_the_first_versions_and_they_are_taken_back(policy, too_high):
    fleet = Fleet(policy)
    fleet.plant_faults(too_high)
    assert fleet.clock.run(lambda: len({report.device_id for report in fleet.alarms()}) == 2, LIMIT_S)
    histories = fleet.core.members.measurements
    assert max(histories[name].updates for name in ("device-1", "device-2")) <= 6
    assert fleet.train(UPDATES)
    assert fleet.accuracy() >= TARGET
    # Folded together, the first updates already count with a length that is usual among them.
    rollbacks = fleet.core.policy_engine.state.divergence.rollbacks
    assert rollbacks == isinstance(policy.aggregate, ImmediateAggregator)


def test_a_fleet_whose_updates_all_grow_shuts_nobody_out_and_learns():
    fleet = Fleet(Policy(), learning_rate=0.1)
    assert fleet.train(2 * BEFORE_FAULTS)
    model = fleet.hub.engine.model
    noise = np.random.default_rng(0).normal(0.0, 1.5, NETWORK.spec.length).astype(np.float32)
    model.advance(Snapshot(model.current.number, model.current.vector + noise))
    assert fleet.train(UPDATES)
    # The first of them are far over what was usual, and shortened; then it is what most send.
    assert {report.device_id for report in fleet.alarms()} <= {""}
    assert fleet.core.updates_rejected < 0.1 * fleet.updates
    assert fleet.core.status(0.0)["alarms"] == []
    assert fleet.accuracy() >= TARGET


def test_a_majority_of_broken_devices_does_not_take_the_others_model_from_them():
    fleet = Fleet(Policy())
    for device, part in list(zip(fleet.devices, fleet.parts, strict=True))[:5]:
        device.training.trainer = trainer_on(Dataset(np.full_like(part.x, np.nan), part.y), LEARNING_RATE, 1)
    assert fleet.train(UPDATES // 2)
    assert fleet.core.policy_engine.state.divergence.rollbacks <= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_reports_losses_on_another_scale_does_not_speak_for_the_others(seed):
    fleet = Fleet(Policy(), devices=5, seed=seed)
    fleet.devices[0].training.trainer = Elsewhere(fleet.devices[0].training.trainer, 1e6)
    assert fleet.train(UPDATES)
    assert fleet.core.policy_engine.state.divergence.rollbacks <= 1
    assert fleet.accuracy() >= TARGET


@pytest.mark.parametrize("deviation", [10.0, 1e6, 1e15])
def test_what_the_first_device_spoils_before_anybody_else_is_there_is_taken_back(deviation):
    fleet = Fleet(Policy(), devices=5, started=1)
    first = fleet.devices[0]
    first.training.trainer = Spoiler(deviation)
    assert fleet.train(1)
    first.cut_power()
    assert np.isfinite(fleet.hub.model).all()
    assert np.abs(fleet.hub.model).max() > deviation
    for device in fleet.devices[1:]:
        device.start()
    assert fleet.train(UPDATES)
    assert fleet.core.policy_engine.state.divergence.rollbacks == 1
    assert fleet.accuracy() >= 0.9


def test_a_device_alone_whose_data_changes_its_scale_is_not_shut_out():
    fleet = Fleet(Policy(), devices=1)
    assert fleet.train(60)
    part = fleet.parts[0]
    fleet.devices[0].training.trainer = trainer_on(Dataset(30 * part.x, part.y), LEARNING_RATE, 1)
    before = fleet.core.updates_applied
    fleet.clock.run(lambda: fleet.updates >= before + 400, LIMIT_S)
    assert fleet.core.updates_applied >= before + 300
    applied = fleet.core.updates_applied
    assert fleet.train(applied + 20), "training does not continue"
    assert fleet.updates <= applied + fleet.core.updates_rejected + 21


def test_a_hasty_device_that_learns_far_too_fast_is_found_among_a_few_and_costs_one_rollback():
    fleet = Fleet(Policy(aggregate=ImmediateAggregator(), frequency=FixedFrequency()), devices=4)
    hasty = fleet.devices[0]
    hasty.training.trainer = trainer_on(fleet.parts[0], 5.0, 1)
    hasty.training.change_speed(hasty.training.step_s / 30)
    assert fleet.train(UPDATES // 2)
    assert fleet.core.policy_engine.state.divergence.rollbacks == 1, "its first update; then there is a bound"
    assert [alarm["device"] for alarm in fleet.core.status(0.0)["alarms"]] == ["device-1"]
    # Folded one by one, a device that sends 30 times as often counts 30 times as much: that is the operator's.
    assert fleet.accuracy() < TARGET
    fleet.order("quarantine", "device-1")
    assert fleet.train(2 * UPDATES)
    assert fleet.accuracy() >= 0.9


def test_a_converged_fleet_stays_calm():
    fleet = Fleet(Policy(), devices=20, alpha=0.3)
    assert fleet.train(repetitions("thousands of updates of a converged fleet") * UPDATES)
    assert fleet.accuracy() >= TARGET
    assert fleet.core.updates_rejected < 0.02 * fleet.updates


@both_policies
@pytest.mark.parametrize("some", [False, True], ids=["all", "half"])
def test_devices_that_tell_no_loss_train_and_nobody_is_alarmed(policy, some):
    fleet = Fleet(policy, seed=3, started=0)
    for number, device in enumerate(fleet.devices):
        if not some or number % 2:
            device.training.trainer = Wordless(device.training.trainer)
        device.start()
    assert fleet.train(UPDATES)
    assert fleet.accuracy() >= TARGET
    assert (fleet.core.updates_rejected, fleet.core.status(0.0)["alarms"]) == (0, [])
    losses = [device["loss"] for device in fleet.core.status(0.0)["devices"]]
    assert [loss is None for loss in losses] == [not some or number % 2 == 1 for number in range(8)]
