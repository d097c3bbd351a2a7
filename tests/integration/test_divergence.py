"""Planted divergence with real processes: the hub tells of it, the status explains it, training gets there."""

import json
import signal

import numpy as np
import pytest

from tests.support.programs.processes import LIVELINESS, PATIENCE_S, trained

pytestmark = pytest.mark.process

EVALUATE_EVERY = 300
HEALTHY = ("first", "second")

NAN_AGENT = """
import sys
import numpy as np
from edgeasync import StepResult
from edgeasync.durable.identity import DeviceIdentity
from edgeasync.runtime.agent import AgentRuntime
from edgeasync.runtime.agent_settings import AgentSection, AgentSettings
from edgeasync.runtime.device import Device
from edgeasync.runtime.workload import Workload
from edgeasync.cli.serving import serve

class BrokenSensor:
    spec = None
    def begin(self, parameters):
        self._parameters = parameters
    def step(self):
        self._parameters[:] = np.nan
        return StepResult(float("nan"), 1)

def make_trainer(welcome):
    trainer = BrokenSensor()
    trainer.spec = welcome.spec
    return trainer

section = AgentSection(hub=sys.argv[1], step_s_min=0.005)
device = Device("broken").open(DeviceIdentity("broken", "0" * 32, 1), section)
agent = AgentRuntime(AgentSettings(agent=section), device, Workload(make_trainer))
print(serve(agent, 60, int))
"""


def test_faulty_devices_are_told_of_and_training_reaches_its_accuracy(commands):
    held_out = commands.data("held-out.npz")
    settings = commands.settings(
        hub="stop = { accuracy = 0.95 }",
        more=f'{LIVELINESS}[evaluation]\ndata = "{held_out}"\nevery = "{EVALUATE_EVERY} updates"\n',
    )
    hub, address = commands.hub(settings)
    healthy = [commands.agent(address, name, step_s=0.005) for name in HEALTHY]
    trained(address, 20)
    # Nobody else speaks while the faulty ones are looked at, so the run cannot be over before that.
    for agent, name in zip(healthy, HEALTHY, strict=True):
        agent.signal(signal.SIGTERM)
        hub.wait_for("left", device=name)

    with np.load(commands.data("scaled.npz")) as data:
        x, y = data["x"], data["y"]
    # In another unit and with the wrong sign; the right sign would only make the model surer of itself.
    np.savez(commands.folder / "scaled.npz", x=-1e6 * x, y=y)
    commands.agent(address, "scaled", data=commands.folder / "scaled.npz", step_s=0.005)
    commands.start(address, program=("-c", NAN_AGENT))
    told = hub.wait_for("alarm", device="scaled")
    assert "times as long as is usual in the fleet: check the scale of its inputs" in told["detail"]
    assert told["detail"].endswith("; to exclude it, run 'edgeasync device quarantine scaled'")
    assert told["figures"]["times_usual"] > 4
    assert told["figures"]["updates"] == 3
    assert "not finite: check its data" in hub.wait_for("alarm", device="broken")["detail"]

    asked = commands.run("status", "--hub", address, "--json")
    assert (asked.returncode, asked.stderr) == (0, "")
    alarms = {alarm["device"]: alarm for alarm in json.loads(asked.stdout)["alarms"] if alarm["device"]}
    assert set(alarms) == {"scaled", "broken"}
    assert {alarm["remedy"] for alarm in alarms.values()} == {"alert"}
    assert "times as long as is usual" in alarms["scaled"]["cause"]
    (cause,) = alarms["scaled"]["causes"]
    assert cause["figures"]["times_usual"] > 4
    assert cause["updates"] >= 3
    assert "not finite" in alarms["broken"]["cause"]
    shown = commands.run("status", "--hub", address)
    assert (shown.returncode, shown.stderr) == (0, "")
    words = " ".join(shown.stdout.split())
    for name in alarms:
        assert f"alarm: {name}, for " in words
        assert f"; 'edgeasync device quarantine {name}' excludes it" in words
        assert commands.run("device", "quarantine", name, "--hub", address).returncode == 0

    for name in HEALTHY:
        commands.agent(address, name, step_s=0.005)
    assert hub.wait(PATIENCE_S) == 0, str(hub)
    assert hub.stderr == ""
    assert "accuracy" in hub.wait_for("evaluated")["detail"]
    assert "is at least 95.00%" in hub.wait_for("finished")["detail"]
    stopped = hub.wait_for("stopped")
    assert stopped["reason"] == "finished"
    assert stopped["updates_rejected"] > 3
    # The fleet may have alarms of its own: the first two long updates counted, shortened.
    assert {event["device"] for event in hub.events if event["event"] == "alarm"} - {""} == set(alarms)
