"""`edgeasync agent`: what its flags and its settings say reaches what does it. The agents run in this process."""

import json

import onnxruntime
import pytest
from typer.main import get_command

from edgeasync.cli import agent, main
from edgeasync.errors import ConfigError
from tests.support.models.graphs import forward_model
from tests.support.programs.command_line import ADDRESS, CONFIG, FILES, NO_HUB, mistake
from tests.support.programs.processes import LIVELINESS, trained

pytestmark = pytest.mark.process

MOST = 3_000_000_000

GRAPH_TABLE = 'kind = "onnx"\nfile = "forward.onnx"'


def test_without_an_address_it_uses_that_of_status(commands, monkeypatch):
    def refuse(settings, *_, **__):
        raise ConfigError(f"the hub is {settings.agent.hub}")

    monkeypatch.setattr(agent, "AgentRuntime", refuse)
    (usual,) = [
        option.default for option in get_command(main.app).commands["status"].params if option.name == "hub"
    ]
    arguments = ["agent", "--data", commands.data("data.npz"), "--state", "state"]
    mistake(commands, CONFIG, f"the hub is {usual}", arguments=arguments)


def test_a_graph_is_run_by_as_many_threads_as_the_flag_says_whatever_the_file_does(commands, monkeypatch):
    (commands.folder / "forward.onnx").write_bytes(forward_model())
    sessions = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, graph, options, providers, **rest):
            super().__init__(graph, options, providers, **rest)
            sessions.append(self)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    _, address = commands.hub(commands.settings(model=GRAPH_TABLE, hub="stop = { updates = 3 }"))
    (commands.folder / "agent.toml").write_text("agent.threads = 2\n")
    fixed = ["--hub", address, "--data", commands.data("data.npz"), "--device-id", "pi", "--state", "state"]
    told = commands.run("agent", "agent.toml", *fixed, "--threads", 3)
    assert (told.returncode, told.stderr) == (0, "")
    assert "finished" in told.stdout
    (session,) = sessions
    assert session.get_session_options().intra_op_num_threads == 3


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


def test_a_day_has_as_many_bytes_as_were_asked_for_over_all_its_starts(commands):
    _, address = commands.hub(commands.settings(more=LIVELINESS))
    (commands.folder / "agent.toml").write_text('limits.bytes_per_day_max = "3 GB"\n')
    used = []
    for updates in (3, 6):
        agent = commands.agent(address, "pi", "agent.toml")
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
    mistake(commands, FILES, "quota.json", "format 2", arguments=["agent", "agent.toml", *fixed])
