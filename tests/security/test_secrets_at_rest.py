"""What proves who somebody is lies in key files alone: not in a run's folder, a log, a status or an error."""

import base64
import json

import numpy as np
import pytest

from edgeasync.core.hub.settings import CheckpointSettings, HubCoreSettings, Liveness
from edgeasync.data.dataset import Dataset, batches
from edgeasync.durable.disk import FolderDisk
from edgeasync.policies.optimizers import SGD
from edgeasync.policies.policy import Policy
from edgeasync.simulation.clock import VirtualClock
from edgeasync.simulation.fleet import SimulatedDevice
from edgeasync.simulation.hub import SimulatedHub
from edgeasync.simulation.link import LinkProfile
from edgeasync.training.numpy_models import SoftmaxModel
from edgeasync.training.trainer import GradientTrainer

MODEL = SoftmaxModel(inputs=3, classes=2)


def forms_of(secret):
    """Return what a secret of bytes may look like in a file."""
    encoded = base64.b64encode(secret).rstrip(b"=")
    urlsafe = base64.urlsafe_b64encode(secret).rstrip(b"=")
    return {
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        encoded,
        urlsafe,
        repr(secret).encode()[2:-1],
    }


def found_in(content, secrets):
    """Return which secrets stand in some bytes, in whatever form."""
    return [secret.hex() for secret in secrets if any(form in content for form in forms_of(secret))]


class Fleet:
    """A hub on a folder and three devices, in virtual time."""

    def __init__(self, folder):
        self.clock = VirtualClock()
        self.hub = SimulatedHub(
            self.clock,
            spec=MODEL.spec,
            initial=MODEL.initial(0),
            policy=Policy(),
            settings=HubCoreSettings(
                checkpoint=CheckpointSettings(every="10 updates"), liveness=Liveness(heartbeat_s=1.0, lease_s=3.0)
            ),
            seed=1,
            disk=FolderDisk(folder),
        )
        self.devices = [self.make_device(number) for number in range(3)]

    def make_device(self, number):
        x = np.random.default_rng(number).normal(size=(40, 3)).astype(np.float32)
        data = batches(Dataset(x, (x[:, 0] > 0).astype(np.int64)), 8, seed=number)
        trainer = GradientTrainer(MODEL.spec, MODEL.gradient, (SGD(learning_rate=0.1),), data)
        link = LinkProfile(1e6, 1e6, 0.01)
        device = SimulatedDevice(
            self.clock, self.hub, f"device-{number}", trainer, step_s=0.1, link=link, examples=40, seed=number
        )
        device.start()
        return device

    def run(self, seconds):
        self.clock.run(lambda: False, self.clock.now_s + seconds)

    def sessions(self):
        return {device.engine.core.welcome.session for device in self.devices}

    def state_ids(self):
        return {device._state_id for device in self.devices}


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "run").mkdir()
    return Fleet(tmp_path / "run")


def test_a_run_has_digests_of_sessions_and_state_ids_alone(fleet, tmp_path):
    secrets = fleet.state_ids()
    for _ in range(2):
        fleet.run(8.0)
        secrets |= fleet.sessions()
        fleet.hub.crash()
        fleet.hub.start()
    fleet.run(1.0)
    assert len(secrets) == 9
    names = {path.name.partition("-")[0] for path in (tmp_path / "run").iterdir()}
    assert names == {"checkpoint", "journal"}
    for path in (tmp_path / "run").iterdir():
        assert found_in(path.read_bytes(), secrets) == [], path.name
    core = fleet.hub.core
    told = "\n".join([*fleet.hub.engine.recorder.lines(), json.dumps(core.status(0.0))])
    assert found_in(told.encode(), secrets) == []


def test_a_device_keeps_its_session_over_a_start_of_the_hub(fleet):
    fleet.run(2.0)
    sessions, answered = fleet.sessions(), fleet.devices[0].engine.core.work.updates_answered
    fleet.hub.crash("kept")
    fleet.hub.start()
    fleet.run(2.0)
    assert fleet.sessions() == sessions
    assert fleet.devices[0].engine.core.work.updates_answered > answered
