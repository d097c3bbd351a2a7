"""The cores in virtual time: learning, unequal speeds, links, pieces, and exact repetition."""

import hashlib
import io
from unittest.mock import patch

import numpy as np
import pytest
from rich.console import Console

from edgeasync.cli.status import View, describe_status
from edgeasync.core.hub.settings import FLOAT32, HubCoreSettings, Limits, Liveness, StopCondition
from edgeasync.data import load_digits
from edgeasync.data.dataset import batches
from edgeasync.data.partition import dirichlet
from edgeasync.errors import GraphError
from edgeasync.policies.aggregation import ImmediateAggregator
from edgeasync.policies.frequency import TimeFrequency
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.graph import ShippedGraph
from edgeasync.protocol.messages import GraphHeader, Piece
from edgeasync.protocol.status import read_status
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import MlpModel
from edgeasync.training.trainer import StepResult
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload
from tests.support.parts.small_runs import plain
from tests.support.parts.statuses import DAEMON
from tests.support.simulation.hubs import simulated_hub

SLOWNESS = (1, 1, 3, 10)

POLICY = plain(16)
"""Every device for itself, and always the same work: what takes time here is the simulator's alone."""


class Digits:
    """Four unequal devices on the digits, non-IID, each with a link of its own."""

    def __init__(self, *, link=None, settings=None, hidden=(64,), graph=None, policy=POLICY):
        dataset = load_digits()
        order = np.random.default_rng(0).permutation(len(dataset))
        self.held_out = dataset.take(order[:360])
        self.network = MlpModel(inputs=64, hidden=hidden, classes=10)
        self.clock = VirtualClock()
        self.hub = simulated_hub(
            self.clock, self.network, policy, settings=settings or HubCoreSettings(codec=FLOAT32), graph=graph
        )
        parts = dirichlet(dataset.take(order[360:]), 4, 0.5, 0, examples_min=32)
        self.devices = [
            SimulatedDevice(
                self.hub,
                f"device-{number}",
                GradientTrainer(
                    self.network.spec,
                    self.network.gradient,
                    [SGD(learning_rate=0.1)],
                    batches(part, 32, number),
                ),
                step_s=0.004 * slowness,
                link=link or LinkProfile(),
                workload=SimulatedWorkload(examples=len(part)),
            )
            for number, (part, slowness) in enumerate(zip(parts, SLOWNESS, strict=True), start=1)
        ]

    def train(self, updates, limit_s=3600.0):
        for device in self.devices:
            device.start()
        done = self.clock.run(lambda: self.hub.core.updates_applied >= updates, limit_s)
        self.hub.core.check()
        return done

    def accuracy(self):
        predicted = self.network.predict(self.hub.model, self.held_out.x)
        return float((predicted == self.held_out.y).mean())


def test_unequal_devices_learn_and_the_fast_give_more():
    fleet = Digits()
    assert fleet.train(updates=400)
    assert fleet.accuracy() >= 0.95
    given = [fleet.hub.core.members.members[f"device-{n}"].updates_applied for n in (1, 2, 3, 4)]
    assert given[0] == pytest.approx(given[1], abs=2)
    assert given[0] / given[2] == pytest.approx(3, rel=0.1)
    assert given[0] / given[3] == pytest.approx(10, rel=0.2)


def test_a_lone_device_learns_what_it_would_learn_without_a_hub():
    """Red before: the hub's momentum came on top of the device's own optimizer."""
    fleet = Digits(policy=Policy())
    (lone, *_), fleet.devices = fleet.devices, fleet.devices[:1]
    assert fleet.train(updates=50)
    alone = Digits().devices[0].training.trainer
    vector = fleet.network.initial(0)
    alone.begin(vector)
    apart = []
    for _ in range(lone.steps_total):
        alone.step()
        apart.append(float(np.abs(vector - fleet.hub.model).max()))
    assert min(apart) < 1e-5
    assert len(apart) - int(np.argmin(apart)) < 0.2 * len(apart), "but for the steps that are not sent yet"


def test_the_same_seed_gives_the_same_run_to_the_bit():
    def trace():
        fleet = Digits()
        fleet.train(updates=60)
        return hashlib.sha256(fleet.hub.model).hexdigest(), fleet.clock.now_s, fleet.hub.core.status(0.0)

    assert trace() == trace()


def test_a_link_costs_its_bytes_and_its_delay():
    link = LinkProfile(up_bytes_per_s=20_000, down_bytes_per_s=40_000, delay_s=0.25)
    fleet = Digits(link=link)
    assert fleet.train(updates=8)
    fast = fleet.devices[0]
    payload = fleet.network.spec.nbytes
    cycle_s = 16 * 0.004 + payload / 20_000 + payload / 40_000 + 2 * 0.25
    answered = [time_s for time_s, tell in fast.told if tell.event == "answered"]
    assert np.diff(answered) == pytest.approx(cycle_s, rel=0.05)


def test_a_ping_measures_the_delay_of_the_link():
    settings = HubCoreSettings(codec=FLOAT32, liveness=Liveness(heartbeat_s=1.0, lease_s=5.0))
    fleet = Digits(link=LinkProfile(delay_s=0.2), settings=settings)
    assert fleet.train(updates=20)
    assert fleet.devices[3].engine.core.round_trip_s == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize("link", [LinkProfile(), LinkProfile(down_bytes_per_s=2_000_000, delay_s=0.05)])
def test_every_device_takes_the_hubs_graph_in_before_it_trains(link):
    graph = ShippedGraph(np.random.default_rng(0).bytes(3 << 20))
    settings = HubCoreSettings(codec=FLOAT32, limits=Limits(snapshots_max=2))
    fleet = Digits(graph=graph, link=link, settings=settings)
    for device in fleet.devices:
        device.start()
    assert fleet.clock.run(lambda: all(device.steps_total for device in fleet.devices), 60.0)
    for device in fleet.devices:
        assert device.store.graphs == {graph.fingerprint: graph.payload}
        assert [tell.event for _, tell in device.told][:2] == ["joined", "graph"]
    accepted = fleet.hub.core.messages_accepted
    assert accepted["fetchgraph"] == 4, "once each"
    assert fleet.hub.core.messages_refused >= 2, "two at once, the others were busy"


class Meddling:
    """A link that spoils or loses some of the messages that go to a device."""

    def __init__(self, device, spoil, times):
        self._deliver = device._deliver
        self._spoil = spoil
        self.times = times
        device._deliver = self.deliver

    def deliver(self, peer, header, payload):
        if self.times and isinstance(wire.decode(header), GraphHeader | Piece):
            self.times -= 1
            if (payload := self._spoil(payload)) is None:
                return
        self._deliver(peer, header, payload)


@pytest.mark.parametrize("size", [1000, 3 << 20])
@pytest.mark.parametrize(
    "spoil", [lambda payload: None, lambda payload: bytes(len(payload or b""))], ids=["lost", "corrupt"]
)
def test_a_graph_that_is_spoilt_on_its_way_is_fetched_again(spoil, size):
    graph = ShippedGraph(np.random.default_rng(0).bytes(size))
    fleet = Digits(graph=graph)
    meddlers = [Meddling(device, spoil, 3) for device in fleet.devices]
    assert fleet.train(updates=40)
    assert [meddler.times for meddler in meddlers] == [0] * 4
    whole = {graph.fingerprint: graph.payload}
    assert fleet.clock.run(lambda: all(device.store.graphs == whole for device in fleet.devices), 60.0)


def test_a_forged_graph_ends_the_device():
    graph = ShippedGraph(b"sound")
    fleet = Digits(graph=graph)
    fleet.hub.core.graph.payload = b"evil!"
    graph.checksum = wire.checksum(graph.payload)
    assert not fleet.train(updates=1, limit_s=60.0)
    assert {type(device.finished.error) for device in fleet.devices} == {GraphError}
    assert not any(device.store.graphs for device in fleet.devices)


def test_a_finished_hub_sends_its_devices_home():
    fleet = Digits(settings=HubCoreSettings(codec=FLOAT32, stop=StopCondition(updates=10)))
    with patch.object(fleet.hub, "save", wraps=fleet.hub.save) as save:
        assert fleet.train(updates=10)
        assert fleet.clock.run(lambda: all(device.finished for device in fleet.devices), 60.0)
    assert {device.finished.error for device in fleet.devices} == {None}
    assert fleet.hub.stopped == "finished"
    assert save.call_args.args[0].snapshot.number == fleet.hub.core.version


def test_a_power_cut_loses_the_work_and_a_new_start_goes_on():
    fleet = Digits(settings=HubCoreSettings(codec=FLOAT32, liveness=Liveness(heartbeat_s=0.5, lease_s=1.5)))
    device = fleet.devices[0]
    fleet.train(updates=8)
    member = fleet.hub.core.members.members["device-1"]
    applied, seq = member.updates_applied, member.seq_last
    assert device.steps_total < 16 * (applied + 1), "it was at work"
    device.cut_power()
    assert not device.running
    cut_s = fleet.clock.now_s
    fleet.clock.run(lambda: not member.live, 60.0)
    assert 1.0 <= fleet.clock.now_s - cut_s <= 2.0, "no goodbye: its lease ran out"
    assert (member.updates_applied, device.steps_total) == (applied, 0)
    device.start()
    assert fleet.clock.run(lambda: member.updates_applied >= applied + 3, 60.0)
    assert (member.incarnation, member.seq_last) == (2, seq + 3)
    device.cut_power()
    device.start()
    assert fleet.clock.run(lambda: member.updates_applied >= applied + 6, 60.0), "within its lease, likewise"
    assert (member.incarnation, member.seq_last) == (3, seq + 6)
    assert fleet.hub.core.messages_refused == fleet.hub.core.updates_rejected == 0
    fleet.hub.core.check()


def test_a_push_that_had_not_wholly_left_is_lost_with_the_power():
    fleet = Digits(link=LinkProfile(up_bytes_per_s=10_000))
    device = fleet.devices[0]
    device.start()
    size = fleet.network.spec.nbytes
    assert fleet.clock.run(lambda: device.up.bytes_sent > size, 60.0)
    sent, begun_s = device.up.bytes_sent, fleet.clock.now_s
    fleet.clock.run(lambda: False, begun_s + 0.5)
    device.cut_power()
    assert sent - device.up.bytes_sent == pytest.approx(size - 5_000, rel=0.02)
    fleet.clock.run(lambda: False, begun_s + 60.0)
    assert fleet.hub.core.messages_accepted["push"] == 0


def test_a_changed_speed_holds_for_the_rest_of_the_work():
    fleet = Digits()
    device = fleet.devices[0]
    device.start()
    fleet.clock.run(lambda: False, 8 * 0.004)
    device.training.change_speed(0.2)
    assert device.steps_total == 8
    history = fleet.hub.core.members.measurements["device-1"]
    assert fleet.clock.run(lambda: history.updates == 1, 60.0)
    assert fleet.clock.now_s == pytest.approx(8 * 0.004 + 8 * 0.2)
    assert history.step_s == pytest.approx((0.004 + 0.2) / 2)
    assert fleet.clock.run(lambda: history.updates == 2, 60.0)
    assert fleet.clock.now_s == pytest.approx(8 * 0.004 + 24 * 0.2)


class Idle:
    """Takes steps on batches of eight, and learns nothing."""

    def __init__(self, spec):
        self.spec = spec

    def begin(self, parameters):
        pass

    def step(self):
        return StepResult(1.0, 8)


# -- a time that was set ---------------------------------------------------------------------------------------


def every_minute(**bounds):
    """Return a fleet that is to exchange every 60 s, and how long the last exchanges of each device were apart."""
    clock, spec = VirtualClock(), MlpModel(inputs=2, hidden=(2,), classes=2).spec
    policy = Policy(
        aggregate=ImmediateAggregator(), optimizer=(SGD(),), frequency=TimeFrequency(seconds=60.0, **bounds)
    )
    hub = simulated_hub(clock, spec, policy)
    devices = [
        SimulatedDevice(
            hub,
            f"device-{slowness}",
            Idle(spec),
            step_s=0.01 * slowness,
            link=LinkProfile(),
            workload=SimulatedWorkload(examples=40),
        )
        for slowness in (1, 2, 3)
    ]
    for device in devices:
        device.start()
    clock.run(lambda: False, 1200.0)
    answered = [[at_s for at_s, tell in device.told if tell.event == "answered"] for device in devices]
    return hub.core.status(clock.now_s), [times[-1] - times[-2] for times in answered]


def test_a_time_that_is_set_is_kept():
    status, apart_s = every_minute()
    assert apart_s == pytest.approx([60.0] * 3, rel=0.01)
    assert status["cadence"]["period_s"] == pytest.approx(60.0, rel=0.01)
    assert (status["cadence"]["aim_s"], status["cadence"]["bound"]) == (60.0, "")


def test_what_is_shown_is_what_is_done():
    steps, bound = 50, "local_steps_max"
    status, apart_s = every_minute(local_steps_max=steps)
    assert apart_s == pytest.approx([0.01 * steps, 0.02 * steps, 0.03 * steps], rel=0.01)
    assert status["cadence"]["period_s"] == pytest.approx(0.02 * steps, rel=0.01)
    assert (status["cadence"]["aim_s"], status["cadence"]["bound"]) == (60.0, bound)
    for device, found_s in zip(status["devices"], apart_s, strict=True):
        assert device["period_s"] == pytest.approx(found_s, rel=0.01)
        assert device["bound"] == bound
    words = f"target 60.00 s: limited by {bound}"
    console = Console(width=200, file=io.StringIO())
    console.print(describe_status(read_status(status | DAEMON), View(), console, 50))
    assert words in console.file.getvalue()


# -- a device whose link is capped -----------------------------------------------------------------------------

CAPPED = LinkProfile(16 << 10, 16 << 10, 0.005)


def beside(*links, seconds=30.0):
    """Return a fleet under the default policy after a while: its status, and the exchanges of the first device."""
    clock, spec = VirtualClock(), MlpModel(inputs=64, hidden=(256,), classes=10).spec
    hub = simulated_hub(clock, spec)
    for number, link in enumerate((LinkProfile(), *links)):
        SimulatedDevice(
            hub, f"device-{number}", Idle(spec), step_s=0.05, link=link, workload=SimulatedWorkload(examples=400)
        ).start()
    clock.run(lambda: False, seconds)
    return hub.core.status(clock.now_s), hub.core.members.members["device-0"].measurements.updates


def test_a_capped_device_holds_up_nobody_and_the_period_shown_is_kept():
    _, alone = beside()
    for links in ((CAPPED,), (CAPPED, CAPPED), (LinkProfile(), CAPPED)):
        status, exchanges = beside(*links)
        assert exchanges >= 0.8 * alone
        assert status["cadence"]["period_s"] == pytest.approx(30.0 / exchanges, rel=0.1)
        assert status["devices"][0]["period_s"] == pytest.approx(30.0 / exchanges, rel=0.1)
        assert status["devices"][-1]["updates_applied"] > 0, "who is capped counts all the same"
