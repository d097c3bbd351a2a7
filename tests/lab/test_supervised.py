"""An agent and a hub under a supervisor that does what systemd does with their units."""

import json
import signal
from pathlib import Path

import pytest

from edgeasync.host.notify import HUBLESS
from edgeasync.ops.service.unit import Unit
from tests.support.boards.supervisor import HANGING, Supervisor
from tests.support.programs.peers import FILE, name_of, write_list
from tests.support.programs.processes import MODEL_TABLE, trained

pytestmark = pytest.mark.process


def unit(kind, folder):
    return Unit(kind, Path("/opt/edgeasync/current/bin/edgeasync"), folder)


@pytest.fixture
def agent_settings(commands):
    """Write an agent's settings, and its trainer where that is found; return what takes the hub's address."""

    def write(address, trainer=None, more=""):
        own = f'data = "{commands.data("a.npz")}"' if trainer is None else 'trainer = "hanging:make_trainer"'
        (commands.folder / "hanging.py").write_text(HANGING)
        (commands.folder / "agent.toml").write_text(
            f'[agent]\nhub = "{address}"\n{own}\ndevice_id = "pi-1"\nstate = "state"\nstep_s_min = 0.002\n{more}\n'
        )

    return write


def test_a_hung_trainer_is_ended_and_the_same_device_trains_again(commands, agent_settings):
    _, address = commands.hub(commands.settings())
    agent_settings(address, HANGING, "progress_s = 0.3")
    with Supervisor(
        unit("agent", commands.folder).text(), commands.folder, WatchdogSec="1", RestartSec="0"
    ) as agent:
        agent.wait_for("STATUS=hangs: no local step for")
        agent.wait_for("READY=1", start=2)
        status = trained(address, device="pi-1")
    assert agent.ends[0][2] == str(-signal.SIGABRT)
    assert [device["id"] for device in status["devices"]] == ["pi-1"]
    shown = "\n".join(line for _, number, line in agent.lines if number == 1)
    assert "Fatal Python error: Aborted" in shown
    assert "hanging.py" in shown  # where it hung


def test_a_killed_agent_comes_back_as_the_same_device(commands, agent_settings):
    _, address = commands.hub(commands.settings())
    agent_settings(address)
    with Supervisor(unit("agent", commands.folder).text(), commands.folder, RestartSec="0") as agent:
        agent.wait_for("STATUS=joined ")
        agent.process.kill()
        agent.wait_for("STATUS=joined ", start=2)
        status = trained(address, device="pi-1")
    assert [device["id"] for device in status["devices"]] == ["pi-1"]
    assert json.loads((commands.folder / "state/identity.json").read_text())["start"] == 2


def test_an_agent_stays_when_its_hub_has_finished(commands, agent_settings):
    hub, address = commands.hub(commands.settings(hub="stop = { updates = 5 }"))
    agent_settings(address)
    with Supervisor(unit("agent", commands.folder).text(), commands.folder) as agent:
        agent.wait_for("<6>finished", what="lines")
        assert hub.wait() == 0
    assert (agent.starts, agent.ends[0][2]) == (1, "0")
    assert "STOPPING=1" in [line for _, _, line in agent.news]


def test_a_peer_ends_with_its_training_and_stays_down(commands):
    write_list(commands.folder, [0, 1])
    (commands.folder / "peer.toml").write_text(
        f'[peer]\ndata = "{commands.data("a.npz")}"\ndevice_id = "{name_of(0)}"\nstate = "{name_of(0)}"\n'
        f'peers = "{FILE}"\nlease_s = 1.0\nsteps_max = 20\n'
        f"[model]\n{MODEL_TABLE}\n"
    )
    with Supervisor(unit("peer", commands.folder).text(), commands.folder, RestartSec="0") as agent:
        agent.wait_for("READY=1")
        agent.wait_for(f"STATUS={HUBLESS} alone")
        agent.wait_for("<6>stopped", what="lines")
        agent.wait_for("0", what="ends")
    assert agent.starts == 1


def test_a_mistake_that_a_restart_cannot_cure_is_told_once_with_its_priority(commands, agent_settings):
    agent_settings("nonsense")
    with Supervisor(unit("agent", commands.folder).text(), commands.folder) as agent:
        agent.wait_for("<3>edgeasync: hub (--hub): 'nonsense' is not an address", what="lines")
        agent.wait_for("8", what="ends")
    assert agent.starts == 1


def test_a_hub_is_ready_when_it_listens_and_says_how_it_does(commands):
    commands.settings(name="hub")
    with Supervisor(unit("hub", commands.folder).text(), commands.folder, WatchdogSec="1") as hub:
        hub.wait_for("STATUS=listening tcp://127.0.0.1:")
        for _ in range(3):
            assert hub.starts == 1
            hub.wait_for("WATCHDOG=1")
    told = [line for _, _, line in hub.news]
    assert told.index("READY=1") < told.index("STOPPING=1")
    assert hub.ends[0][2] == "0"
    assert [line for _, _, line in hub.lines if line.startswith("<6>listening")]
