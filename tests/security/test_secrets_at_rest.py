"""What proves who somebody is lies in key files alone: not in a run's folder, a log, a status or an error."""

import base64
import json
import secrets
import stat
import time

import numpy as np
import pytest

from edgeasync.core.hub.settings import CheckpointSettings, HubCoreSettings, Liveness
from edgeasync.data.dataset import Dataset, batches
from edgeasync.durable.device_keys import DeviceKeys
from edgeasync.durable.disk import FolderDisk
from edgeasync.durable.keys import KeyPair, operator_keys
from edgeasync.policies.optimizers import SGD
from edgeasync.protocol.messages import Enrol, Enrolled, Ping
from edgeasync.training.gradient_trainer import GradientTrainer
from edgeasync.training.numpy_models import SoftmaxModel
from simulation.clock import VirtualClock
from simulation.fleet import SimulatedDevice
from simulation.link import LinkProfile
from simulation.training import SimulatedWorkload
from tests.support.programs.command_line import ACCESS
from tests.support.programs.processes import until
from tests.support.security.keyed import begin_push, client, start_hub
from tests.support.simulation.hubs import simulated_hub

MODEL = SoftmaxModel(inputs=3, classes=2)
PLANTED = 20
MORE = '[policy.aggregate]\nkind = "immediate"\n[checkpoint]\nevery = "3 updates"\n'


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


def found_in(content, planted):
    """Return which secrets stand in some bytes, in whatever form."""
    return [secret.hex() for secret in planted if any(form in content for form in forms_of(secret))]


class Fleet:
    """A hub on a folder and three devices, in virtual time."""

    def __init__(self, folder):
        self.clock = VirtualClock()
        self.hub = simulated_hub(
            self.clock,
            MODEL,
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
            self.hub,
            f"device-{number}",
            trainer,
            step_s=0.1,
            link=link,
            workload=SimulatedWorkload(examples=40),
            seed=number,
        )
        device.start()
        return device

    def run(self, seconds):
        self.clock.run(lambda: False, self.clock.now_s + seconds)

    def sessions(self):
        return {device.engine.core.welcome.session for device in self.devices}

    def state_ids(self):
        return {device.engine.core._greeting.own.state_id for device in self.devices}


@pytest.fixture
def fleet(tmp_path):
    (tmp_path / "run").mkdir()
    return Fleet(tmp_path / "run")


def test_a_run_has_digests_of_sessions_and_state_ids_alone(fleet, tmp_path):
    planted = fleet.state_ids()
    for _ in range(2):
        fleet.run(8.0)
        planted |= fleet.sessions()
        fleet.hub.crash()
        fleet.hub.start()
    fleet.run(1.0)
    assert len(planted) == 9
    names = {path.name.partition("-")[0] for path in (tmp_path / "run").iterdir()}
    assert names == {"checkpoint", "journal"}
    for path in (tmp_path / "run").iterdir():
        assert found_in(path.read_bytes(), planted) == [], path.name
    core = fleet.hub.core
    recorders = [fleet.hub.engine.recorder, *(device.engine.recorder for device in fleet.devices)]
    lines = [line for recorder in recorders for line in recorder.lines()]
    told = "\n".join([*lines, json.dumps(core.status(0.0))])
    assert found_in(told.encode(), planted) == []


def test_a_device_keeps_its_session_over_a_start_of_the_hub(fleet):
    fleet.run(2.0)
    sessions, answered = fleet.sessions(), fleet.devices[0].engine.core.work.updates_answered
    fleet.hub.crash("kept")
    fleet.hub.start()
    fleet.run(2.0)
    assert fleet.sessions() == sessions
    assert fleet.devices[0].engine.core.work.updates_answered > answered


# -- real processes -----------------------------------------------------------------------------------------------


class Planted:
    """Secrets of every kind, with the files that each may stand in."""

    def __init__(self):
        self.places = {}

    def plant(self, secret, *files):
        self.places[secret] = set(files)
        return secret

    def misplaced(self, folder, texts):
        """Return the texts that have a secret, and the secrets that stand in other files than they may."""
        found = [
            (name, secrets) for name, text in texts.items() if (secrets := found_in(text.encode(), self.places))
        ]
        stands = {secret: set() for secret in self.places}
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                for secret in self.places:
                    if found_in(content, [secret]):
                        stands[secret].add(str(path.relative_to(folder)))
        found += [(files, secret.hex()) for secret, files in stands.items() if files != self.places[secret]]
        return found


def live(address, keys, number, planted):
    """Enrol as a device, join, and push an update, with secrets that are planted."""
    token, pair = keys.issue_token(f"pi-{number}", (address,), time.time()), KeyPair.make()
    state_id = planted.plant(secrets.token_bytes(16))
    planted.plant(token.secret)
    planted.plant(pair.secret)
    with client(address, KeyPair.of(token.secret), token.hub) as device:
        device.say(Enrol(pair.public))
        assert device.hear() == Enrolled(f"pi-{number}")
    with client(address, pair, token.hub) as device:
        welcome = device.join(f"pi-{number}", state_id)
        planted.plant(welcome.session)
        begin_push(device, welcome, pieces=False)
        assert device.hear().ack.seq == 1
        device.join(f"pi-{number}", state_id, session=welcome.session)
        device.say(Ping(welcome.session, 1.0, 1))
        device.hear()
    return token.text()


@pytest.mark.process
def test_secrets_lie_in_key_files_alone(commands, keys):
    """The exceptions are a device's own: its state id, in its state folder."""
    planted = Planted()
    hub, address = start_hub(commands, keys, "--log-level", "debug", more=MORE)
    tokens = [live(address, keys, number, planted) for number in range(PLANTED)]
    assert [len(secret) for secret in planted.places].count(16) == 2 * PLANTED
    own = keys.issue_token("board", (address,), time.time())
    start = ("agent", "--data", commands.data("d.npz"), "--json", "--log-level", "debug", "--spool", "full")
    agent = commands.start(*start, "--state", commands.folder / "board", "--enrol", own.text())
    agent.wait_for("joined")
    spool = commands.folder / "board" / "spool.safetensors"
    until(spool.exists, "an update in the spool")
    status = commands.run("status", "--hub", address, "--keys", keys.folder, "--json")
    late = commands.start(*start, "--state", commands.folder / "late", "--enrol", own.text())
    assert late.wait() == ACCESS
    for command in (agent, hub):
        command.signal(15)
        assert command.wait() == 0
    told = [commands.run("replay", commands.folder / "run-hub", "--json"), commands.run("runs", commands.folder)]
    told += [status, commands.run("keys", "list", "--keys", keys.folder, "--json")]
    texts = {str(number): f"{each.stdout}\n{each.stderr}" for number, each in enumerate(told)}
    texts |= {
        name: "\n".join([*each.lines, each.stderr])
        for name, each in {"hub": hub, "agent": agent, "late": late}.items()
    }

    planted.plant(own.secret)
    planted.plant(keys.pair().secret, "keys/hub.key")
    planted.plant(operator_keys(keys.folder)[0].secret, "keys/operator.key")
    for name in ("board", "late"):
        planted.plant(DeviceKeys(commands.folder / name).own().secret, f"{name}/keys/device.key")
        state_id = json.loads((commands.folder / name / "identity.json").read_text())["state_id"]
        kept = [f"{name}/spool.safetensors", f"{name}/model.safetensors"] if name == "board" else []
        files = [f"{name}/identity.json", *kept]
        planted.plant(bytes.fromhex(state_id), *files)
    assert planted.misplaced(commands.folder, texts) == []
    whole = "\n".join(texts.values())
    assert not [token for token in [*tokens, own.text()] if token in whole]
    for path in commands.folder.rglob("*"):
        if path.name in (
            "device.key",
            "identity.json",
            "spool.safetensors",
            "model.safetensors",
            "hub.key",
            "operator.key",
        ):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
