"""A real agent by a fake /sys: what it does in heat and without power, and what its hub says of that."""

import time

import pytest

from edgeasync import Agent, Hub
from edgeasync.host import sensing
from edgeasync.sdk import agent as agents
from tests.support.boards.fake_sys import FakeSys
from tests.support.parts.small_runs import ANYWHERE, DATA, MODEL, plain
from tests.support.programs.processes import until


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A fake /sys that agents are given."""
    fake = FakeSys(tmp_path / "root")
    monkeypatch.setattr(agents, "make_sense", lambda: sensing.make_sense(fake.root))
    return fake


def fleet(tmp_path, limits):
    hub = Hub(MODEL, run=tmp_path / "run", bind=ANYWHERE, policy=plain())
    return hub, lambda: Agent(hub.address, DATA, name="pi", throttle=limits, step_s_min=0.002)


def shown(hub):
    (found,) = hub.status()["devices"]
    return found["state"], found["pace_reason"]


def steps_of(agent):
    (worker,) = agent._workers
    return worker.agent.training.gate.steps_total


def test_a_hot_agent_pauses_within_two_seconds_and_its_hub_says_so(tmp_path, fake):
    hub, start = fleet(tmp_path, {})
    with hub, start() as agent:
        until(lambda: agent.updates_answered >= 3, "updates")
        fake.heat(85.0)
        begun_s = time.monotonic()
        until(lambda: shown(hub) == ("paused", "85 C"), "a pause")
        assert time.monotonic() - begun_s < 2.0
        steps = steps_of(agent)
        fake.heat(86.0)
        (worker,) = agent._workers
        pings = worker.agent.network.bytes_up
        assert worker.agent.joined
        assert worker.agent.stalled_s() == 0.0, "a watchdog sees no hung trainer"
        assert steps_of(agent) <= steps + 1
        assert worker.agent.network.bytes_up == pings


def test_an_agent_that_pauses_can_be_stopped(tmp_path, fake):
    fake.heat(90.0)
    hub, start = fleet(tmp_path, {})
    with hub, start() as agent:
        agent.wait_until_joined(10.0)
        until(lambda: shown(hub)[0] == "paused", "a pause")
    assert agent.wait() == "stopped"


def test_an_agent_takes_its_share_of_the_time(tmp_path, fake):
    hub, start = fleet(tmp_path, {"cpu_share": 0.5})
    with hub, start() as agent:
        until(lambda: agent.updates_answered >= 2, "updates")
        until(lambda: hub.status()["devices"][0]["pace_percent"] == 50, "the pace in a ping")
