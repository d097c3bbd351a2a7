"""A hub and its agents as a person starts them: in any order, stopped, killed, and back again."""

import json
import re
import signal

import psutil
import pytest

from edgeasync.cli.demo import TRAINED_FILE
from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.graphs.model_file import load_model
from tests.support.programs.processes import (
    ENDING_SIGNALS,
    LIVELINESS,
    MODEL,
    PATIENCE_S,
    free_address,
    trained,
)

pytestmark = pytest.mark.process


ONE_BY_ONE = """
[policy]
aggregate = { kind = "immediate" }
optimizer = [{ kind = "sgd" }]
frequency = { kind = "fixed", local_steps = 16 }
"""

both_policies = pytest.mark.parametrize("policy", ["", ONE_BY_ONE], ids=["default", "one by one"])
both_signals = pytest.mark.parametrize("number", ENDING_SIGNALS, ids=lambda number: number.name)


def assert_ended_well(command):
    assert command.wait() == 0, str(command)
    assert command.stderr == ""


# -- agents first, hub later -----------------------------------------------------------------------------------


def test_agents_wait_for_a_hub_and_training_starts_by_itself(commands):
    address = free_address()
    agents = [commands.agent(address, name) for name in ("first", "second")]
    for agent in agents:
        assert address in agent.wait_for("waiting")["detail"]
        assert f"{address}: connection refused" in agent.wait_for("unreachable")["detail"]
    hub, _ = commands.hub(commands.settings(bind=address))
    for agent in agents:
        agent.wait_for("joined")
        hub.wait_for("joined", device=agent.wait_for("started")["device"])
    for name in ("first", "second"):
        trained(address, 10, name)


# -- the hub goes and comes back -------------------------------------------------------------------------------


@both_policies
def test_agents_rejoin_a_hub_that_was_stopped_and_it_goes_on_from_its_model(commands, policy):
    address = free_address()
    settings = commands.settings(bind=address, more=LIVELINESS + policy)
    hub, _ = commands.hub(settings)
    agents = [commands.agent(address, name) for name in ("first", "second")]
    for name in ("first", "second"):
        before = trained(address, 10, name)

    hub.signal(signal.SIGTERM)
    assert_ended_well(hub)
    stopped = hub.wait_for("stopped")
    assert stopped["reason"] == "stopping"
    for agent in agents:
        agent.wait_for("disconnected")
    vector, version = load_model(commands.folder / "run-hub" / MODEL_FILE, MODEL.spec)
    assert version == stopped["version"] >= before["version"]
    assert stopped["updates_applied"] >= before["updates_applied"] + before["updates_buffered"]
    assert vector.any()

    # Another way to train the same model is no other model: the agents take it up.
    settings.write_text(settings.read_text() + "[local]\nbatch_size = 16\n")
    hub, _ = commands.hub(settings)
    assert int(re.match(r"version (\d+),", hub.wait_for("resumed")["detail"])[1]) == version
    for agent in agents:
        agent.wait_for("joined", count=2)
    for name in ("first", "second"):
        after = trained(address, 10, name)
    assert version < after["version"] <= after["updates_applied"]
    if policy == ONE_BY_ONE:
        assert after["version"] == after["updates_applied"]
    assert after["updates_applied"] == sum(device["updates_applied"] for device in after["devices"])
    assert after["lineage"] != before["lineage"]


# -- a clean end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [*ENDING_SIGNALS, signal.SIGHUP], ids=lambda number: number.name)
def test_signals_end_hub_and_agent_cleanly(commands, number):
    hub, address = commands.hub(commands.settings())
    leaver, stayer = commands.agent(address, "leaver"), commands.agent(address, "stayer")
    for name in ("leaver", "stayer"):
        trained(address, 5, name)

    leaver.signal(number)
    assert_ended_well(leaver)
    assert leaver.wait_for("stopped")["reason"] == "stopped"
    hub.wait_for("left", device="leaver", detail="stopping")

    hub.signal(number)
    assert_ended_well(hub)
    assert hub.wait_for("stopped")["reason"] == "stopping"
    assert hub.names()[-2:] == ["stopping", "stopped"]
    assert "lost" not in hub.names()
    assert "hub is stopping" in stayer.wait_for("disconnected")["detail"]

    stayer.signal(number)
    assert_ended_well(stayer)


BUSY_AGENT = """
import os, sys, threading, time
import numpy as np
from edgeasync import StepResult
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import Device
from edgeasync.runtime.workload import Workload
from edgeasync.cli.serving import serve

class Busy:
    spec = None
    def begin(self, parameters):
        pass
    def step(self):
        print('{"event": "computing"}', flush=True)
        time.sleep(600)  # as a step that takes minutes in a library's code: nobody can interrupt it
        return StepResult(0.0, 1)

def make_trainer(welcome):
    trainer = Busy()
    trainer.spec = welcome.spec
    return trainer

section = AgentSection(hub=sys.argv[1])
device = Device("busy").open(DeviceIdentity("busy", "0" * 32, 1), section)
agent = AgentRuntime(AgentSettings(agent=section), device, Workload(make_trainer))
print(serve(agent, 60, int), flush=True)
os._exit(0)  # as commands end
"""


@both_signals
def test_signals_end_an_agent_whose_step_cannot_be_interrupted(commands, number):
    hub, address = commands.hub(commands.settings())
    agent = commands.start(address, program=("-c", BUSY_AGENT))
    agent.wait_for("computing")
    agent.signal(number)
    assert_ended_well(agent)
    assert agent.lines[-1] == "stopped"
    hub.wait_for("left", device="busy", detail="stopping")


@both_signals
def test_signals_end_an_agent_that_still_waits_for_its_hub(commands, number):
    agent = commands.agent(free_address(), "lonely")
    agent.wait_for("waiting")
    agent.signal(number)
    assert_ended_well(agent)


# -- the end of training ---------------------------------------------------------------------------------------


@both_policies
def test_training_ends_after_the_wanted_updates_and_agents_end_by_themselves(commands, policy):
    hub, address = commands.hub(commands.settings(hub="stop = { updates = 40 }", more=LIVELINESS + policy))
    agents = [commands.agent(address, name) for name in ("first", "second")]
    assert_ended_well(hub)
    stopped = hub.wait_for("stopped")
    assert stopped["reason"] == "finished"
    applied, version = stopped["updates_applied"], stopped["version"]
    if policy == ONE_BY_ONE:
        assert (applied, version) == (40, 40)
    else:  # the two are folded together
        assert 40 <= applied < 42
        assert applied / 2 <= version <= applied
    assert load_model(commands.folder / "run-hub" / MODEL_FILE, MODEL.spec)[1] == version
    assert stopped["model"] == str(commands.folder / "run-hub" / MODEL_FILE)
    for agent in agents:
        assert_ended_well(agent)
        assert "finished" in agent.wait_for("stopped")["reason"]
    assert sum(agent.wait_for("stopped")["updates_answered"] for agent in agents) <= applied


# -- status ----------------------------------------------------------------------------------------------------


def test_status_is_told_to_scripts_and_to_people(commands):
    hub, address = commands.hub(commands.settings())
    commands.agent(address, "first")
    second = commands.agent(address, "second")
    for name in ("first", "second"):
        trained(address, 5, name)
    second.signal(signal.SIGTERM)
    hub.wait_for("left", device="second")

    asked = commands.run("status", "--hub", address, "--json")
    assert (asked.returncode, asked.stderr) == (0, "")
    (line,) = asked.stdout.splitlines()
    status = json.loads(line)
    assert {device["id"]: device["state"] for device in status["devices"]} == {
        "first": "training",
        "second": "left",
    }
    assert all(device["why"] and device["examples_per_s"] > 0 for device in status["devices"])
    assert status["updates_applied"] == sum(device["updates_applied"] for device in status["devices"]) > 0
    assert (status["pid"], status["address"]) == (hub.pid, address)

    shown = commands.run("status", "--hub", address)
    assert (shown.returncode, shown.stderr) == (0, "")
    for words in ("first", "second", "left", f"pid {hub.pid}", "period", "talk"):
        assert words in shown.stdout


# -- the demo --------------------------------------------------------------------------------------------------


def test_demo(commands):
    demo = commands.start("demo", "--json", "--run", "demo")
    assert_ended_well(demo)
    result = json.loads(demo.lines[-1])
    assert "event" not in result
    assert result["accuracy"] >= 0.95
    assert result["devices_total"] == 4
    assert result["dropped"] >= 1
    assert result["rejoined"] >= 1
    assert result["updates_applied"] == sum(device["updates_applied"] for device in result["devices"].values()) > 0
    assert result["updates_rejected"] >= 0
    assert result["duplicates"] >= 0
    assert result["seconds"] >= 15
    assert result["model"] == str(commands.folder / "demo" / TRAINED_FILE)
    assert len(demo.events) == len(demo.lines) - 1
    assert demo.wait_for("killed", device="device-2")
    assert demo.wait_for("lost", device="device-2")
    assert demo.wait_for("rejoined", device="device-2", detail="start 2")


@pytest.mark.parametrize(
    ("event", "count", "number"),
    [
        ("started", 1, signal.SIGINT),
        ("joined", 4, signal.SIGINT),
        ("killed", 1, signal.SIGINT),
        ("started", 1, signal.SIGHUP),
    ],
)
def test_ctrl_c_and_a_hangup_end_the_demo_and_leave_no_process_behind(commands, event, count, number):
    demo = commands.start("demo", "--json", "--seconds", "6", "--run", "demo")
    demo.wait_for(event, count=count)
    assert_interrupted(demo, psutil.Process(demo.pid).children(recursive=True), number)


def test_an_impatient_second_ctrl_c_leaves_no_process_behind_either(commands):
    demo = commands.start("demo", "--json", "--seconds", "6", "--run", "demo")
    demo.wait_for("joined", count=4)
    children = psutil.Process(demo.pid).children(recursive=True)
    demo.signal(signal.SIGINT)
    demo.wait_for("left")
    assert_interrupted(demo, children)


def test_a_demo_that_is_killed_leaves_no_process_behind_either(commands):
    demo = commands.start("demo", "--json", "--seconds", "60", "--run", "demo")
    demo.wait_for("joined", count=4)
    children = psutil.Process(demo.pid).children(recursive=True)
    demo.signal(signal.SIGKILL)
    assert_gone(children)
    demo.wait()
    assert "Traceback" not in demo.stderr


def assert_interrupted(demo, children, number=signal.SIGINT):
    demo.signal(number)
    assert demo.wait() == 130
    assert "Traceback" not in demo.stderr
    assert_gone(children)


def assert_gone(children):
    assert children
    _, alive = psutil.wait_procs(children, PATIENCE_S)
    for child in alive:
        child.kill()
    assert not alive
