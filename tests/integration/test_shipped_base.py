"""A hub ships the frozen values of its model once: over cuts and kills, for all agents of a user."""

import os
import signal

import pytest

from edgeasync import nn
from tests.support.programs.processes import trained
from tests.support.security.keyed import Proxy

pytestmark = pytest.mark.process

HIDDEN = 1000
FROZEN_BYTES = 4 * (8 * HIDDEN + HIDDEN * HIDDEN + 2 * HIDDEN)
CUTS = 5
LOST_BYTES = 1 << 19
"""What a cut loses at most: the pieces that are on their way."""


@pytest.fixture
def model(commands):
    """Write a forward model, most of which the hub freezes."""
    layers = nn.Linear(8, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3)
    path = commands.folder / "forward.onnx"
    path.write_bytes(nn.to_onnx(nn.Sequential(*layers), (8,)).SerializeToString())
    return path


def start_hub(commands, model, bind="tcp://127.0.0.1:*"):
    hub = commands.start("hub", "--model", model, "--train", "4.*", "--bind", bind, "--run", "run", "--json")
    return hub, hub.wait_for("listening")["detail"]


def base_in(folder):
    """Return the only base in a folder; a partial download is not one."""
    (file,) = folder.glob("*.base")
    return file


def bases(commands):
    return commands.folder / ".cache/edgeasync/bases"


def has_base(commands, agent, way):
    nbytes = base_in(commands.folder / "run").stat().st_size
    return agent.wait_for("base", detail=f"{way}, {nbytes} bytes")


def test_a_download_continues_after_cuts_and_after_the_agent_was_killed(commands, model):
    _, address = start_hub(commands, model)
    cut_after = [FROZEN_BYTES // (CUTS + 1)] * CUTS
    with Proxy(int(address.rpartition(":")[2]), *cut_after) as proxy:
        agent = commands.agent(proxy.address, "pi")
        agent.wait_for("disconnected", count=2)
        agent.kill()
        (part,) = bases(commands).iterdir()
        assert FROZEN_BYTES // 8 < (part_bytes := part.stat().st_size) < FROZEN_BYTES
        agent = commands.agent(proxy.address, "pi")
        has_base(commands, agent, "fetched")
        resumed = agent.wait_for("base")["detail"]
        assert int(resumed.split()[3]) >= part_bytes
        assert proxy.cut == CUTS
        assert FROZEN_BYTES < proxy.down_bytes < FROZEN_BYTES + CUTS * LOST_BYTES
        trained(address, 3, "pi")
    assert base_in(bases(commands)).read_bytes() == base_in(commands.folder / "run").read_bytes()


def test_all_agents_of_a_user_share_a_base(commands, model):
    hub, address = start_hub(commands, model)
    first = commands.agent(address, "one")
    has_base(commands, first, "fetched")
    trained(address, 3, "one")
    first.kill()
    agents = [commands.agent(address, name) for name in ("two", "three")]
    for agent in agents:
        has_base(commands, agent, "from the cache")
    trained(address, 3, "two")
    status = trained(address, 3, "three")
    assert status["messages_accepted"]["fetchgraph"] == 4, "three times the graph, once the base"

    hub.kill()
    written = base_in(commands.folder / "run").stat().st_mtime_ns
    assert base_in(commands.folder / "run").stat().st_mode & 0o777 == 0o400
    start_hub(commands, model, address)
    for agent in agents:
        agent.wait_for("joined", count=2)
    assert base_in(commands.folder / "run").stat().st_mtime_ns == written


def test_agents_that_start_at_once_download_a_base_once(commands, model):
    _, address = start_hub(commands, model)
    agents = [commands.agent(address, f"pi-{number}") for number in range(3)]
    for number in range(3):
        trained(address, 3, f"pi-{number}")
    events = [event for agent in agents for event in agent.events if event["event"] == "base"]
    ways = [event["detail"].split(",")[0] for event in events]
    assert (ways.count("fetched"), ways.count("from the cache")) == (1, 2), ways


def test_a_run_is_exported_and_a_damaged_base_is_downloaded_again(commands, model):
    _, address = start_hub(commands, model)
    agent = commands.agent(address, "pi")
    has_base(commands, agent, "fetched")
    trained(address, 3, "pi")
    assert commands.run("export", "run", "--out", "exported.onnx").returncode == 0
    assert (commands.folder / "exported.onnx").stat().st_size > FROZEN_BYTES
    agent.kill()
    file = base_in(bases(commands))
    file.chmod(0o600)  # the file is read-only
    os.truncate(file, FROZEN_BYTES // 2)
    again = commands.agent(address, "pi")
    has_base(commands, again, "fetched")
    assert "damaged" in again.wait_for("warning")["detail"]
    trained(address, 3, "pi")
    assert file.stat().st_size >= FROZEN_BYTES


def test_a_folder_that_cannot_be_written_is_reported(commands, model):
    _, address = start_hub(commands, model)
    (commands.folder / "file").write_text("")
    settings = commands.folder / "agent.toml"
    settings.write_text(f'[agent]\nbase_cache = "{commands.folder / "file"}"\n')
    agent = commands.start(
        "agent", settings, "--hub", address, "--data", commands.data("d.npz"), "--device-id", "pi", "--json"
    )
    assert "[agent] base_cache" in agent.wait_for("warning")["detail"]
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 0
