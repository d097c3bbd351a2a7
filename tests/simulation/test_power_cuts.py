"""Devices that keep their work over power cuts: the same number again, and nothing counted twice."""

import numpy as np
import pytest

from edgeasync.core.settings import CodecSettings, HubCoreSettings, Liveness
from edgeasync.data.dataset import Dataset, batches
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.protocol import wire
from edgeasync.protocol.messages import Assignment, Duplicate, Push
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.fleet import SimulatedDevice, SimulatedHub
from edgeasync.simulation.link import LinkProfile
from edgeasync.simulation.population import Churn, switch_off_and_on
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.trainer import GradientTrainer

MODEL = SoftmaxModel(inputs=4, classes=3)
LINK = LinkProfile(up_bytes_per_s=20_000, down_bytes_per_s=20_000, delay_s=0.05)
SETTINGS = HubCoreSettings(liveness=Liveness(heartbeat_s=0.2, lease_s=0.5))


class Fleet:
    """A hub and its devices, and what was pushed and answered."""

    def __init__(self, devices, *, keeps=True, settings=SETTINGS, alone_steps_max=0):
        generator = np.random.default_rng(0)
        self.clock = VirtualClock()
        self.hub = SimulatedHub(
            self.clock, spec=MODEL.spec, initial=MODEL.initial(0), judgement=Policy(), settings=settings, seed=0
        )
        self.pushed, self.answers = [], []
        self._receive, self.hub.receive = self.hub.receive, self.receive
        self.devices = []
        for number in range(devices):
            data = Dataset.of(generator.normal(size=(30, 4)), generator.integers(0, 3, 30))
            trainer = GradientTrainer(
                MODEL.spec, MODEL.gradient, [SGD(learning_rate=0.1, momentum=0.5)], batches(data, 8, number),
                keep_optimizer_state=True,
            )  # fmt: skip
            device = SimulatedDevice(
                self.clock, self.hub, f"device-{number}", trainer, step_s=0.01, link=LINK, keeps=keeps,
                alone_steps_max=alone_steps_max,
            )  # fmt: skip
            device._deliver = self.note_answers(device._deliver)
            self.devices.append(device)

    def receive(self, peer, header, payload):
        message = wire.decode(header)
        if isinstance(message, Push):
            self.pushed.append((peer.partition(b"#")[0].decode(), message, payload))
        self._receive(peer, header, payload)

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
    assert core.updates_applied + core.updates_rejected + len(core.judge) == seqs
    assert core.duplicates
    warnings = [tell for device in fleet.devices for _, tell in device.told if tell.event == "warning"]
    assert not warnings


def test_a_device_goes_on_where_the_power_cut_left_it():
    fleet = Fleet(1)
    (device,) = fleet.devices
    device.start()
    fleet.until(lambda: len(fleet.pushed) == 3)
    device.cut_power()
    state = device._trainer.state()
    assert device.spool.push.seq == 3
    assert all(np.array_equal(state[name], array) for name, array in device.spool.trainer.items())
    device._trainer.step()
    device.start()
    fleet.until(lambda: len(fleet.pushed) == 4)
    (_, before, payload), (_, after, payload_again) = fleet.pushed[2:]
    assert (before.seq, before.base, payload) == (after.seq, after.base, payload_again)
    assert all(np.array_equal(array, device._trainer.state()[name]) for name, array in state.items())
    fleet.until(lambda: device.exchange.core.updates_answered == 1)
    fleet.until(lambda: len(fleet.pushed) == 5)
    assert fleet.pushed[-1][1].seq == 4
