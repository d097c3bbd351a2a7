"""Agents whose hub stalls or dies: what they keep over a power cut, where they turn, and how far they go alone."""

import json
import signal

import pytest

from edgeasync.durable.spool_file import SpoolFile
from tests.support.programs.processes import LIVELINESS, fetch_status, status_when, trained

pytestmark = pytest.mark.process

ONE_BY_ONE = (
    LIVELINESS + '[policy]\naggregate = { kind = "immediate" }\nfrequency = { kind = "fixed", local_steps = 16 }\n'
)


def kept(folder):
    """Return the number of the update that a device keeps."""
    identity = json.loads((folder / "identity.json").read_text())
    return SpoolFile(folder, identity["state_id"]).read().push.seq


def test_an_agent_killed_with_an_update_under_way_goes_on_with_its_number(commands):
    hub, address = commands.hub(commands.settings(more=ONE_BY_ONE))
    folder = commands.folder / "pi"
    agent = commands.agent(address, "pi", "--spool", "full")
    trained(address, 3, "pi")
    hub.signal(signal.SIGSTOP)
    agent.wait_for("disconnected")
    seq = kept(folder)
    agent.kill()
    assert kept(folder) == seq
    agent = commands.agent(address, "pi", "--spool", "full")
    agent.wait_for("waiting")
    hub.signal(signal.SIGCONT)
    agent.wait_for("joined")
    trained(address, 5, "pi")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 0
    last = kept(folder)
    assert last >= seq + 4
    status = status_when(address, lambda status: status["devices"][0]["state"] == "left")
    assert last - 1 <= status["updates_applied"] <= last
    assert status["updates_rejected"] == 0
    assert "warning" not in agent.names()


def test_an_agent_turns_to_the_next_hub_when_the_first_dies(commands):
    first, address = commands.hub(commands.settings(more=ONE_BY_ONE))
    _, other = commands.hub(commands.settings(more=ONE_BY_ONE, name="other"))
    agent = commands.agent(address, "pi", "--hub", other)
    assert agent.wait_for("joined")["detail"] == f"{address}: as pi"
    trained(address, 3, "pi")
    assert fetch_status(other, 60.0)["devices"] == []
    first.kill()
    agent.wait_for("joined", detail=f"{other}: as pi")
    status = trained(other, 3, "pi")
    assert status["devices"][0]["id"] == "pi"


def test_an_agent_cut_off_trains_on_alone_and_merges(commands):
    hub, address = commands.hub(commands.settings(more=ONE_BY_ONE))
    agent = commands.agent(address, "pi", "--alone-steps-max", 40)
    trained(address, 3, "pi")
    hub.signal(signal.SIGSTOP)
    agent.wait_for("alone")
    since = len(agent.events)
    hub.signal(signal.SIGCONT)
    agent.wait_for("joined", since=since)
    trained(address, 3, "pi")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 0
