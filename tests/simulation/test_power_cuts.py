"""Devices that keep their work over power cuts: the same number again, and nothing counted twice."""

import numpy as np
import pytest

from edgeasync.core.device.limits import DeviceLimits
from edgeasync.core.hub.settings import CodecSettings, HubCoreSettings, Limits, Liveness
from edgeasync.data.dataset import Dataset, batches
from edgeasync.policies.optimizers import SGD
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Duplicate, Push
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import SoftmaxModel
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.population import Churn, switch_off_and_on
from tests.support.simulation.hubs import simulated_hub

MODEL = SoftmaxModel(inputs=4, classes=3)
LINK = LinkProfile(up_bytes_per_s=20_000, down_bytes_per_s=20_000, delay_s=0.05)
SETTINGS = HubCoreSettings(liveness=Liveness(heartbeat_s=0.2, lease_s=0.5))


class Fleet:
    """A hub and its devices, and what was pushed and answered."""

    def __init__(self, devices, *, keeps=True, settings=SETTINGS, alone_steps_max=0):
        generator = np.random.default_rng(0)
        self.clock = VirtualClock()
        self.settings = settings
        self.pushed, self.answers = [], []
        self.hub = self.make_hub(0)
        self.devices = []
        for number in range(devices):
            data = Dataset.of(generator.normal(size=(30, 4)), generator.integers(0, 3, 30))
            trainer = GradientTrainer(
                MODEL.spec, MODEL.gradient, [SGD(learning_rate=0.1, momentum=0.5)], batches(data, 8, number),
                keep_optimizer_state=True,
            )  # fmt: skip
            device = SimulatedDevice(
                self.hub, f"device-{number}", trainer, step_s=0.01, link=LINK, keeps=keeps,
                limits=DeviceLimits(alone_steps_max=alone_steps_max),
            )  # fmt: skip
            device._deliver = self.note_answers(device._deliver)
            if keeps:
                device.up.send_message = kept_before(device, device.up.send_message)
            self.devices.append(device)

    def make_hub(self, seed):
        """Return a hub that remembers nothing, and notes what it receives."""
        hub = simulated_hub(self.clock, MODEL, settings=self.settings, seed=seed)
        receive = hub.receive

        def note(peer, header, payload):
            message = wire.decode(header)
            if isinstance(message, Push):
                self.pushed.append((peer.partition(b"#")[0].decode(), message, payload))
            receive(peer, header, payload)

        hub.receive = note
        return hub

    def turn_to(self, hub):
        """Let the devices find another hub where the last one was."""
        self.hub = hub
        for device in self.devices:
            device._hub = hub
            device.break_connection()

    def note_answers(self, deliver):
        def note(peer, header, payload):
            message = wire.decode(header)
            ack = message.ack if isinstance(message, Assignment) else message
            if hasattr(ack, "outcome"):
                self.answers.append(ack)
            deliver(peer, header, payload)

        return note

    def until(self, condition, limit_s=60.0):
        assert self.clock.run(condition, self.clock.now_s + limit_s)


def kept_before(device, send):
    """Return `send` that lets no update leave but the one that is kept, under that number."""

    def check(header, payload, arrive):
        message = wire.decode(header)
        if isinstance(message, Push):
            kept = device.store.spool.push
            assert (message.seq, message.base, message.checksum) == (kept.seq, kept.base, kept.checksum)
        send(header, payload, arrive)

    return check


@pytest.mark.parametrize("codec", ["auto", "top_k(0.2)"])
def test_power_cuts_repeat_numbers_and_count_nothing_twice(codec):
    fleet = Fleet(4, settings=HubCoreSettings(liveness=SETTINGS.liveness, codec=CodecSettings(push=codec)))
    for number, device in enumerate(fleet.devices):
        device.start()
        switch_off_and_on(fleet.clock, device, Churn(on_s=0.8, off_s=0.4), f"cuts/{number}")
    for second in range(1, 41):
        fleet.clock.run(lambda: False, float(second))
        fleet.hub.core.check()
    contents = {}
    repeated = 0
    for device_id, push, payload in fleet.pushed:
        content = (push.base, push.local_steps, push.loss_mean, push.checksum, payload)
        repeated += (device_id, push.seq) in contents
        assert contents.setdefault((device_id, push.seq), content) == content
    core = fleet.hub.core
    seqs = sum(member.seq_last for member in core.members.members.values())
    assert all(device.starts > 20 for device in fleet.devices)
    assert repeated > 20
    assert any(isinstance(answer.outcome, Duplicate) for answer in fleet.answers)
    assert core.updates_applied + core.updates_rejected + core.policy_engine.gathering.count == seqs
    assert core.duplicates
    warnings = [report for device in fleet.devices for _, report in device.told if report.event == "warning"]
    assert not warnings


def test_a_device_goes_on_where_the_power_cut_left_it():
    fleet = Fleet(1)
    (device,) = fleet.devices
    device.start()
    fleet.until(lambda: len(fleet.pushed) == 3)
    device.cut_power()
    state = device.training.trainer.state()
    assert device.store.spool.push.seq == 3
    assert all(np.array_equal(state[name], array) for name, array in device.store.spool.trainer.items())
    device.training.trainer.step()
    device.start()
    fleet.until(lambda: len(fleet.pushed) == 4)
    (_, before, payload), (_, after, payload_again) = fleet.pushed[2:]
    assert (before.seq, before.base, payload) == (after.seq, after.base, payload_again)
    assert all(np.array_equal(array, device.training.trainer.state()[name]) for name, array in state.items())
    fleet.until(lambda: device.engine.core.work.updates_answered == 1)
    fleet.until(lambda: len(fleet.pushed) == 5)
    assert fleet.pushed[-1][1].seq == 4


class Partition:
    """While it is on the hub hears nothing of the first device."""

    def __init__(self, fleet):
        self._receive = fleet.hub.receive
        self.on = False
        fleet.hub.receive = self.receive

    def receive(self, peer, header, payload):
        if not (self.on and peer.startswith(b"device-0#")):
            self._receive(peer, header, payload)


@pytest.mark.parametrize("alone", [0, 50])
def test_a_device_that_is_cut_off_goes_alone_to_its_limit_and_merges(alone):
    fleet = Fleet(1, alone_steps_max=alone)
    partition = Partition(fleet)
    (device,) = fleet.devices
    device.start()
    fleet.until(lambda: len(fleet.pushed) == 3)
    partition.on = True
    fleet.clock.run(lambda: False, fleet.clock.now_s + 5.0)
    assert device.engine.core.work.state == "pushing"
    unanswered = device.store.spool
    steps = sum(push.local_steps for _, push, _ in fleet.pushed) + unanswered.push.local_steps
    assert device.steps_total == steps + alone
    assert [report.event for _, report in device.told].count("alone") == (alone > 0)
    partition.on = False
    answered = device.engine.core.work.updates_answered
    fleet.until(lambda: device.engine.core.work.updates_answered == answered + 3)
    pushes = {push.seq: push for _, push, _ in fleet.pushed}
    assert (pushes[unanswered.push.seq].checksum, unanswered.push.overlap_steps) == (unanswered.push.checksum, 0)
    after = pushes[unanswered.push.seq + 1]
    assert after.overlap_steps == alone
    assert after.local_steps > alone
    assert pushes[unanswered.push.seq + 2].overlap_steps == 0
    assert np.isfinite(fleet.hub.model).all()
    assert fleet.hub.core.updates_rejected == 0


@pytest.mark.parametrize("away_s", [0.1, 3.0, 300.0])
@pytest.mark.parametrize("way", ["cut off", "without power"])
@pytest.mark.parametrize("forgets", [False, True], ids=["known", "forgotten"])
@pytest.mark.parametrize("lost", ["update", "answer"])
def test_a_device_that_was_away_is_counted_once(away_s, way, forgets, lost):
    """For less than its lease or for long, and the hub may have given its place to another meanwhile."""
    settings = HubCoreSettings(liveness=SETTINGS.liveness, limits=Limits(devices_max=1))
    fleet = Fleet(2, settings=settings)
    partition = Partition(fleet)
    device, other = fleet.devices
    device.start()
    fleet.until(lambda: len(fleet.pushed) == 3)
    if lost == "update":
        fleet.until(lambda: device.engine.core.work.updates_answered == 3)
    partition.on = True
    if lost == "update":
        fleet.until(lambda: device.engine.core.work.state == "pushing")
    device.break_connection()
    if way == "without power":
        device.cut_power()
    if forgets:
        other.start()
        fleet.until(lambda: other.engine.core.work.updates_answered == 2)
        other.cut_power()
        away_s += 1.0
    fleet.clock.run(lambda: False, fleet.clock.now_s + away_s)
    partition.on = False
    if way == "without power":
        device.start()
    answered = device.engine.core.work.updates_answered
    fleet.until(lambda: device.engine.core.work.updates_answered >= answered + 3)
    seqs = {}
    for owner, push, _ in fleet.pushed:
        seqs.setdefault((owner, push.checksum, push.loss_mean), set()).add(push.seq)
    core = fleet.hub.core
    assert all(len(numbers) == 1 for numbers in seqs.values())
    assert core.updates_applied + core.updates_rejected + core.policy_engine.gathering.count <= len(seqs)


@pytest.mark.parametrize("keeps", [False, True])
def test_another_hub_with_an_empty_state_or_an_older_one_takes_over(keeps):
    """At the same address or another: what was learnt from one's model does not count at the other."""
    fleet = Fleet(2, keeps=keeps)
    for device in fleet.devices:
        device.start()
    hubs = [fleet.hub, fleet.make_hub(1), fleet.make_hub(2)]
    for number in (0, 1, 2, 0, 1):
        fleet.turn_to(hubs[number])
        fleet.devices[0].cut_power()
        fleet.devices[0].start()
        applied = fleet.hub.core.updates_applied
        fleet.until(lambda applied=applied: fleet.hub.core.updates_applied >= applied + 20)
        fleet.hub.core.check()
    assert all(device.running for device in fleet.devices)
