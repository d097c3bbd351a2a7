"""`edgeasync agent`: what its flags and its settings say reaches what does it. The agents run in this process."""

import json

import onnxruntime
import pytest
from typer.main import get_command

from edgeasync.cli import agent, main
from edgeasync.core.device.data_quota import SPARE_BYTES, QuotaRecord
from edgeasync.core.engine import device_transfers
from edgeasync.durable.quota_file import QuotaFile
from edgeasync.errors import ConfigError
from edgeasync.protocol.pacing import Pacer
from tests.support.models.graphs import forward_model
from tests.support.programs.command_line import ADDRESS, CONFIG, FILES, NO_HUB, mistake
from tests.support.programs.processes import LIVELINESS, status_when, trained

pytestmark = pytest.mark.process

MOST = 3_000_000_000

GRAPH_TABLE = 'kind = "onnx"\nfile = "forward.onnx"'


def run_agent(commands, address, *arguments, key=""):
    """Run an agent until its hub has what it wants; what is set stands in a file, or in flags."""
    (commands.folder / "agent.toml").write_text(f"{key}\n")
    fixed = ["--hub", address, "--data", commands.data("data.npz"), "--device-id", "pi", "--state", "state"]
    told = commands.run("agent", "agent.toml", *fixed, *arguments)
    assert (told.returncode, told.stderr) == (0, "")
    assert "finished" in told.stdout


def hub_of(commands, model):
    return commands.hub(commands.settings(model=model, hub="stop = { updates = 3 }"))


def test_without_an_address_it_uses_that_of_status(commands, monkeypatch):
    def refuse(settings, *_, **__):
        raise ConfigError(f"the hub is {settings.agent.hub}")

    monkeypatch.setattr(agent, "AgentRuntime", refuse)
    (usual,) = [
        option.default for option in get_command(main.app).commands["status"].params if option.name == "hub"
    ]
    arguments = ["agent", "--data", commands.data("data.npz"), "--state", "state"]
    mistake(commands, CONFIG, f"the hub is {usual}", arguments=arguments)


@pytest.mark.parametrize(
    ("flags", "key", "threads"),
    [
        ([], "", 1),
        (["--threads", 3], "", 3),
        ([], "agent.threads = 2", 2),
        (["--threads", 3], "agent.threads = 2", 3),
    ],
    ids=["default", "flag", "file", "flag over file"],
)
def test_a_graph_is_run_by_as_many_threads_as_were_asked_for(commands, monkeypatch, flags, key, threads):
    (commands.folder / "forward.onnx").write_bytes(forward_model())
    sessions = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, graph, options, providers):
            super().__init__(graph, options, providers)
            sessions.append(self)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    _, address = hub_of(commands, GRAPH_TABLE)
    run_agent(commands, address, *flags, key=key)
    (session,) = sessions
    assert session.get_session_options().intra_op_num_threads == threads


@pytest.mark.parametrize(
    ("flags", "key", "bytes_per_s"),
    [
        ([], "", None),
        (["--bandwidth-bytes-per-s-max", "1 MB"], "", 1_000_000),
        (["--bandwidth-bytes-per-s-max", "2000000"], "", 2_000_000),
        ([], 'limits.bandwidth_bytes_per_s_max = "3 MB"', 3_000_000),
        (["--bandwidth-bytes-per-s-max", "1 MB"], 'limits.bandwidth_bytes_per_s_max = "3 MB"', 1_000_000),
    ],
    ids=["default", "flag", "flag in bytes", "file", "flag over file"],
)
def test_traffic_is_paced_at_the_rate_that_was_asked_for(commands, monkeypatch, flags, key, bytes_per_s):
    pacers = []

    class CountingPacer(Pacer):
        spent_bytes = 0

        def __init__(self, rate):
            super().__init__(rate)
            pacers.append(self)

        def spend(self, size_bytes, now_s):
            self.spent_bytes += size_bytes
            super().spend(size_bytes, now_s)

    monkeypatch.setattr(device_transfers, "Pacer", CountingPacer)
    _, address = hub_of(commands, 'kind = "softmax"\ninputs = 8\nclasses = 3')
    run_agent(commands, address, *flags, key=key)
    if bytes_per_s is None:
        assert pacers == []
    else:
        (pacer,) = pacers
        assert pacer.bytes_per_s == bytes_per_s
        assert pacer.spent_bytes > 0


def test_a_hub_and_an_agent_of_one_machine_may_meet_at_a_file(commands, monkeypatch):
    """`ipc://PATH`, which needs no port; the path counts from the folder that they start in."""
    hub, address = commands.hub(commands.settings(more=LIVELINESS), "--bind", "ipc://hub.sock")
    assert address == f"ipc://{commands.folder}/hub.sock"
    agent = commands.agent(address, "pi")
    agent.wait_for("joined")
    monkeypatch.chdir(commands.folder)
    trained(address, 3, "pi")
    told = commands.run("status", "--hub", address)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith(f"hub {address} (pid {hub.pid})")


def test_a_file_that_nobody_can_meet_at(commands):
    settings, data = commands.settings(), commands.data("data.npz")
    agent = ["agent", "--data", data, "--device-id", "pi", "--state", "state", "--hub", "ipc://"]
    mistake(
        commands, ADDRESS, "'ipc://' is not an address", "tcp://", arguments=["hub", settings, "--bind", "ipc://"]
    )
    mistake(commands, ADDRESS, "'ipc://' is not an address", "tcp://", arguments=agent)
    mistake(commands, ADDRESS, "'ipc://' is not an address", "tcp://", arguments=["status", "--hub", "ipc://"])
    nowhere = "ipc://nowhere/hub.sock"
    mistake(
        commands,
        ADDRESS,
        "/nowhere/hub.sock",
        "cannot listen on this address",
        arguments=["hub", settings, "--bind", nowhere],
    )
    status = ["status", "--hub", nowhere, "--timeout-s", "0.2"]
    mistake(commands, NO_HUB, "no hub answers", nowhere, arguments=status)


def test_every_frame_is_logged_if_that_is_asked_for_and_no_secret(commands):
    hub, address = commands.hub(commands.settings(hub="stop = { updates = 3 }"), "--log-level", "debug")
    agent = commands.agent(address, "pi", "--log-level", "debug")
    for command in (hub, agent):
        assert command.wait() == 0, str(command)
    for stderr, ways in ((hub.stderr, ("in", "out")), (agent.stderr, ("out", "in"))):
        frames = [line for line in stderr.splitlines() if " edgeasync.frames " in line]
        assert len(frames) == len(stderr.splitlines())
        for way, message in zip(ways, ("Hello", "Welcome"), strict=True):
            assert any(f" edgeasync.frames {way} " in line and f" {message}(" in line for line in frames)
        assert any("Push(" in line and not line.endswith("payload of 0 bytes") for line in frames)
        assert "session=b" not in stderr
        assert "state_id=b" not in stderr
    assert "edgeasync.frames" not in "".join(hub.lines + agent.lines)


@pytest.mark.parametrize("command", [["hub", "hub.toml"], ["agent"]], ids=lambda command: command[0])
def test_a_log_level_that_is_not_known(commands, command):
    told = commands.run(*command, "--log-level", "loud")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("edgeasync: --log-level 'loud' is not known; choose from debug, info")


@pytest.mark.parametrize(
    ("flags", "key"), [(["--bytes-per-day-max", "3 GB"], ""), ([], 'limits.bytes_per_day_max = "3 GB"')]
)
def test_a_day_has_as_many_bytes_as_were_asked_for_over_all_its_starts(commands, flags, key):
    _, address = commands.hub(commands.settings(more=LIVELINESS))
    (commands.folder / "agent.toml").write_text(f"{key}\n")
    used = []
    for updates in (3, 6):
        agent = commands.agent(address, "pi", "agent.toml", *flags)
        (device,) = trained(address, updates, "pi")["devices"]
        assert device["bytes_per_day_max"] == MOST
        assert 0 < device["day_left_bytes"] < MOST - sum(used[-1:])
        agent.signal(15)
        assert agent.wait() == 0
        used.append(json.loads((commands.folder / "pi" / "quota.json").read_text())["used_bytes"])
        assert json.loads(agent.lines[-1])["day_left_bytes"] >= MOST - used[-1] > 0
    assert 0 < used[0] < used[1]
    (commands.folder / "pi" / "quota.json").write_text('{"format":2}')
    fixed = ["--hub", address, "--data", "pi.npz", "--device-id", "pi", "--state", "pi"]
    mistake(commands, FILES, "quota.json", "format 2", arguments=["agent", "agent.toml", *fixed, *flags])


def test_an_agent_whose_day_is_spent_says_goodbye(commands):
    _, address = commands.hub(commands.settings(more=LIVELINESS))
    (commands.folder / "pi").mkdir()
    QuotaFile(commands.folder / "pi").write(QuotaRecord(MOST - SPARE_BYTES - 100, 3600.0))
    agent = commands.agent(address, "pi", "--bytes-per-day-max", "3 GB")
    agent.wait_for("joined")
    assert f"of the daily quota of {MOST} bytes are left" in agent.wait_for("resting")["detail"]
    status_when(address, lambda status: [device["state"] for device in status["devices"]] == ["left"])
    agent.signal(15)
    assert agent.wait() == 0
    record = QuotaFile(commands.folder / "pi").read()
    assert MOST - SPARE_BYTES - 100 < record.used_bytes < MOST - SPARE_BYTES + 2000
    assert 3500.0 < record.remaining_s < 3600.0
