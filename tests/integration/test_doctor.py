"""`edgeasync doctor`: a healthy device has no complaint, each planted fault has one line and a cure."""

import fcntl
import importlib.metadata
import json
import socket
import time

import numpy as np
import onnx
import pytest

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.durable.keys import HubKeys, KeyPair, Token
from edgeasync.ops.doctor import examine as doctor
from edgeasync.ops.doctor import training
from edgeasync.ops.doctor.host import judge_system
from edgeasync.ops.doctor.hub import Reached
from tests.support.boards.machine import BOARD, write
from tests.support.programs.command_line import ACCESS, UNFIT, run_command
from tests.support.programs.processes import Commands, free_address, without_rights, write_data
from tests.support.security.keyed import start_hub

pytestmark = pytest.mark.process


LINES = [
    "python", "system", "packages", "provider", "processor", "memory", "disk", "temperature", "power", "clock",
    "state",
    "hub", "key", "protocol", "data", "step", "bandwidth", "traffic",
]  # fmt: skip


class Device:
    """A healthy device in a folder, to be spoilt."""

    def __init__(self, folder, address):
        self.folder, self.address = folder, address
        self.data = write_data(folder / "readings.npz")
        self.root = write(folder / "root", BOARD)
        self.state = folder / "state"
        self.graph = folder / "graph.onnx"
        forward = nn.to_onnx(nn.Linear(8, 3), (8,)).SerializeToString()
        self.graph.write_bytes(build_training_graph(forward, GraphSettings()).model)

    def examine(self, *flags):
        """Return the exit code and the lines by their names."""
        told = run_command(
            self.folder, "doctor", "--hub", self.address, "--data", self.data, "--model", self.graph,
            "--device-id", "pi-1", "--state", self.state, "--root", self.root, "--json", *flags,
        )  # fmt: skip
        assert "Traceback" not in told.stdout + told.stderr
        return told.returncode, {line["name"]: line for line in map(json.loads, told.stdout.splitlines())}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Yield the address of a hub without keys."""
    with Commands(tmp_path_factory.mktemp("hub")) as commands:
        yield commands.hub(commands.settings())[1]


@pytest.fixture
def device(tmp_path, hub):
    return Device(tmp_path, hub)


def test_a_healthy_device_has_no_complaint(device):
    code, lines = device.examine()
    assert code == 0
    assert list(lines) == LINES
    assert {line["level"] for line in lines.values()} == {"ok"}, lines
    assert not any(line["cure"] for line in lines.values())
    assert not device.state.exists()  # nothing was changed
    for name in ("round trip", "sync", "step takes", "MB per hour"):
        assert any(name in line["detail"] for line in lines.values()), name


def test_what_people_read(device):
    told = run_command(
        device.folder, "doctor", "--hub", device.address, "--data", "gone.npz", "--root", device.root
    )
    assert told.returncode == UNFIT
    assert (
        f"fail  data         {device.folder}/gone.npz: no such file; pass the path of a .npz or .csv file\n"
        in told.stdout
    )
    assert told.stderr == "edgeasync: this device cannot train yet: data; follow the remedies in those lines\n"


def plant(files):
    return lambda device, _: write(device.root, files) and ()


def patch(owner, name, value):
    return lambda _, request: request.getfixturevalue("monkeypatch").setattr(owner, name, value)


def no_file(device, _):
    device.data.unlink()


def unfit_data(device, _):
    write_data(device.data, inputs=5)


def a_model_that_is_none(device, _):
    device.graph.write_bytes(b"not a graph")


def a_forward_model(device, _):
    onnx.save(nn.to_onnx(nn.Linear(8, 3), (8,)), device.graph)


def damaged_data(device, _):
    np.savez(device.data, x=np.full((5, 8), np.nan), y=np.zeros(5, int))


def no_hub(device, _):
    device.address = free_address()


def an_unknown_name(device, _):
    device.address = "tcp://hub.invalid:5555"
    return ("--insecure",)


def a_hub_beyond_without_a_key(device, _):
    device.address = "tcp://192.0.2.1:5555"


def another_program(device, request):
    listening = socket.create_server(("127.0.0.1", 0))
    request.addfinalizer(listening.close)
    device.address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"


def a_hub_with_keys(device, request):
    commands = request.getfixturevalue("commands")
    _, device.address = start_hub(commands, HubKeys.init(commands.folder / "keys"))


def a_state_that_is_a_file(device, _):
    device.state.write_text("")


def a_damaged_identity(device, _):
    write(device.state, {"identity.json": "{"})


def a_running_agent(device, request):
    write(device.state, {"lock": ""})
    file = (device.state / "lock").open()
    request.addfinalizer(file.close)
    fcntl.flock(file, fcntl.LOCK_EX)


def identity(**differs):
    known = {"device_id": "pi-1", "state_id": "0" * 32, "start": 1, "machine": "ffffffffffffffff"} | differs
    return lambda device, _: write(device.state, {"identity.json": json.dumps(known)}) and ()


def no_gpu(device, _):
    return ("--provider", "cuda")


FAULTS = {
    "hot": (
        plant({"sys/class/thermal/thermal_zone0/temp": "85000"}), "temperature", "warn", "85 C", "cool the board",
    ),
    "under-voltage": (
        plant({"sys/devices/platform/soc/soc:firmware/get_throttled": "10001"}),
        "power", "warn", "under-voltage now", "power supply",
    ),
    "throttled": (
        plant({"sys/devices/platform/soc/soc:firmware/get_throttled": "4"}),
        "temperature", "warn", "throttled now", "cool the board",
    ),
    "battery": (
        plant({f"sys/class/power_supply/B/{key}": text for key, text in
               {"type": "Battery", "capacity": "8", "status": "Discharging"}.items()}),
        "power", "warn", "battery at 8%", "connect the charger",
    ),
    "memory": (
        plant({"proc/meminfo": "MemTotal: 430000 kB\nMemAvailable: 41000 kB\n"}),
        "memory", "fail", "40 MiB of 420 MiB", "stop other programs",
    ),
    "read-only card": (
        plant({"proc/self/mounts": "/dev/root / ext4 ro 0 0\n"}), "disk", "fail", "read-only", "remount",
    ),
    "slow card": (
        patch(doctor, "time_sync", lambda _: 1.25), "disk", "warn", "a sync takes 1250 ms", "replace the card",
    ),
    "old processor": (
        plant({"proc/cpuinfo": "flags\t: sse\nFeatures\t: fp\n"}), "processor", "warn", "without a", "slow steps",
    ),
    "clock": (patch(time, "time", lambda: 86_400.0), "clock", "warn", ", never set", "timedatectl"),
    "no wheel": (
        patch(doctor, "find_version", lambda name: None if name == "onnxruntime" else "1"),
        "packages", "fail", "cannot import onnxruntime", "reinstall edgeasync",
    ),
    "no GPU": (no_gpu, "provider", "warn", "CPU runs the model, cuda is not installed", "onnxruntime-gpu"),
    "no data": (no_file, "data", "fail", "no such file", "pass the path"),
    "NaN": (damaged_data, "data", "fail", "readings.npz", ""),
    "other data": (unfit_data, "step", "fail", "the data has examples of shape", "use data of that shape"),
    "no graph": (a_model_that_is_none, "step", "fail", "onnxruntime cannot load the graph", ""),
    "forward": (a_forward_model, "step", "fail", "not a training graph", "edgeasync model build"),
    "slow": (
        patch(training, "_time_steps", lambda _: 31.0), "step", "warn", "a step takes 31.0 s", "micro_batch_size",
    ),
    "no hub": (no_hub, "hub", "fail", "refused, nothing listens there", "start the hub"),
    "no name": (an_unknown_name, "hub", "fail", "unknown host name", "DNS"),
    "no key beyond": (a_hub_beyond_without_a_key, "hub", "fail", "is on another machine", "keys enrol"),
    "no key": (a_hub_with_keys, "key", "fail", "the hub accepts enrolled devices only", "keys enrol"),
    "not a hub": (
        another_program, "protocol", "fail", "does not answer as a hub", "check that the port",
    ),
    "state a file": (a_state_that_is_a_file, "state", "fail", "is not a folder", "chown"),
    "identity": (a_damaged_identity, "state", "fail", "identity.json: damaged", "delete it"),
    "locked": (a_running_agent, "state", "warn", "used by a running agent", "another --state"),
    "copied": (identity(), "state", "warn", "last used on another machine", "enrol again"),
    "another's": (identity(device_id="pi-2"), "state", "warn", "belongs to pi-2", "--device-id pi-2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_in_one_line_with_a_cure(fault, device, request):
    plant_it, name, level, detail, cure = FAULTS[fault]
    flags = plant_it(device, request) or ()
    code, lines = device.examine(*flags)
    found = lines[name]
    assert found["level"] == level, lines
    assert detail in found["detail"]
    assert found["cure"]
    assert cure in found["cure"]
    wrong = [line["name"] for line in lines.values() if line["level"] != "ok" and line["name"] != name]
    assert set(wrong) <= {"step"}, lines  # what cannot be measured for that reason
    assert code == (UNFIT if level == "fail" else 0)


def test_onnxruntime_for_a_gpu_counts_as_onnxruntime(monkeypatch):
    found = importlib.metadata.version

    def version(name):
        if name == "onnxruntime":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.31.1" if name == "onnxruntime-gpu" else found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doctor.find_version("onnxruntime") == "1.31.1"
    assert doctor.find_version("numpy") == np.__version__
    assert doctor.find_version("no-such-package") is None


def test_a_system_of_32_bits_is_told_in_one_sentence():
    found = judge_system("Linux", "armv7l", 32, "Raspberry Pi 3 Model B Plus Rev 1.3")
    assert (found.level, found.detail) == ("fail", "Linux armv7l, 32 bits, Raspberry Pi 3 Model B Plus Rev 1.3")
    assert found.cure == "install a 64-bit system: onnxruntime has no packages for 32 bits"


def test_a_state_that_this_user_may_not_look_into_has_its_line(commands):
    closed = commands.folder / "closed"
    closed.mkdir(mode=0)
    doctor = commands.start("doctor", "--state", closed / "state", under=without_rights())
    assert doctor.wait() == UNFIT
    assert "cannot be read by this user; run 'sudo chown -R $USER" in "\n".join(doctor.lines)


def test_a_device_that_has_yet_to_enrol_is_looked_at_like_another(commands, device):
    keys = HubKeys.init(commands.folder / "keys")
    _, device.address = start_hub(commands, keys)
    token = keys.issue_token("pi-1", (device.address,), time.time()).text()
    settings = device.folder / "agent.toml"
    settings.write_text(f'[agent]\nenrol = "{token}"\ndata = "{device.data}"\nstate = "{device.state}"\n')
    told = run_command(device.folder, "doctor", settings, "--model", device.graph, "--root", device.root)
    lines = {line.split()[1]: line for line in told.stdout.splitlines()}
    assert list(lines) == [name for name in LINES if name != "protocol"]
    assert [name for name, line in lines.items() if not line.startswith("ok")] == ["key"]
    assert lines["key"].split(maxsplit=2)[2] == "not enrolled yet; start the agent, which enrols this device"
    assert told.returncode == 0
    assert not device.state.exists()


def used(keys, token):
    keys.use_token(KeyPair.of(Token.read(token).secret).public, KeyPair.make().public, time.time())
    return token


TOKENS = {
    "used": (
        used,
        "rejected the token: it was used",
        "run 'edgeasync keys enrol NAME' at the hub",
    ),
    "cut": (lambda _, token: token[:-5], "enrol (--enrol) is not a complete token", "copy the whole line"),
    "garbage": (lambda *_: "garbage", "enrol (--enrol) is not a complete token", "copy the whole line"),
}


@pytest.mark.parametrize(("spoil", "wrong", "cure"), TOKENS.values(), ids=TOKENS)
def test_a_token_that_lets_nobody_in_has_its_line(commands, device, spoil, wrong, cure):
    """Red before: it was said that the agent would bring its key, or to delete the state."""
    keys = HubKeys.init(commands.folder / "keys")
    _, device.address = start_hub(commands, keys)
    token = spoil(keys, keys.issue_token("pi-1", (device.address,), time.time()).text())
    settings = device.folder / "agent.toml"
    settings.write_text(f'[agent]\nenrol = "{token}"\n')
    code, lines = device.examine(settings)
    assert code == UNFIT
    assert [name for name, line in lines.items() if line["level"] != "ok"] == ["key"]
    assert wrong in lines["key"]["detail"]
    assert cure in lines["key"]["cure"]
    assert not device.state.exists()


def test_what_is_wrong_with_the_state_hides_nothing_else(device):
    _, lines = device.examine("--device-id", "pi-1")
    write(device.state, {"keys/device.key": "", "keys/hub.json": "{"})
    for path in (device.state / "keys", *(device.state / "keys").iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)
    _, damaged = device.examine()
    assert damaged["state"]["level"] == "fail"
    assert list(damaged) == list(lines)


def test_without_an_address_the_usual_one_is_looked_for(device, monkeypatch):
    asked = []
    monkeypatch.setattr(
        doctor, "examine_hub", lambda addresses, *_, **__: asked.append(addresses) or Reached([], None)
    )
    run_command(device.folder, "doctor", "--root", device.root)
    assert asked == [("tcp://127.0.0.1:5555",)]


def test_a_device_with_its_key_asks_as_itself(commands, device):
    keys = HubKeys.init(commands.folder / "keys")
    _, device.address = start_hub(commands, keys)
    token = keys.issue_token("pi-1", (device.address,), time.time()).text()
    agent = commands.start(
        "agent", "--enrol", token, "--data", device.data, "--state", device.state, "--device-id", "pi-1", "--json"
    )
    agent.wait_for("joined")
    _, lines = device.examine()
    assert lines["key"]["detail"] == "authorized by the hub"
    assert lines["state"]["level"] == "warn"  # its agent runs
    keys.revoke("pi-1")
    assert agent.wait() == ACCESS
    _, lines = device.examine()
    assert (lines["key"]["level"], lines["key"]["detail"]) == (
        "fail",
        "the hub does not authorize this device's key",
    )
