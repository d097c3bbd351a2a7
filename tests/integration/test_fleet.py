"""One real fleet, from its keys to an exact replay: the processes that README's test command starts."""

import json
import signal

import pytest

from edgeasync.durable.run_folder import MODEL_FILE
from edgeasync.graphs.model_file import load_model
from edgeasync.net.status import fetch_status
from edgeasync.protocol.wire import checksum
from tests.support.programs.processes import LIVELINESS, MODEL, PATIENCE_S, Commands, free_address, until

pytestmark = pytest.mark.process

NAMES = ("pi-1", "pi-2", "pi-3")


@pytest.fixture
def commands(tmp_path):
    """Yield what starts commands as a shell does, with a new interpreter for each."""
    with Commands(tmp_path) as commands:
        yield commands


def test_a_fleet_with_keys_outlives_kills_and_replays_to_the_bit(commands):
    address, keys = free_address(), commands.folder / "keys"
    settings = commands.settings(bind=address, more=LIVELINESS)
    assert commands.run("keys", "init", "--address", address, "--keys", keys).returncode == 0

    def start_hub():
        return commands.hub(settings, "--keys", keys)[0]

    def start_agent(name, *flags):
        data, state = commands.data(f"{name}.npz"), commands.folder / name
        return commands.start("agent", "--data", data, "--state", state, "--json", *flags)

    def applied():
        status = fetch_status(address, PATIENCE_S, keys)
        return {device["id"]: device["updates_applied"] for device in status["devices"]}

    def train_on(*names, more=10):
        before = applied()
        goals = {name: before.get(name, 0) + more for name in names}
        until(lambda: all(applied().get(name, 0) >= goal for name, goal in goals.items()), f"{goals} updates")

    hub = start_hub()
    agents = {}
    for name in NAMES:
        enrol = commands.run("keys", "enrol", name, "--keys", keys, "--json")
        agents[name] = start_agent(name, "--enrol", json.loads(enrol.stdout)["token"])
    train_on(*NAMES)

    agents["pi-2"].kill()
    hub.wait_for("lost", device="pi-2")
    train_on("pi-1", "pi-3")
    agents["pi-2"] = start_agent("pi-2")
    hub.wait_for("rejoined", device="pi-2")
    train_on(*NAMES)

    before = applied()
    hub.kill()
    hub = start_hub()
    hub.wait_for("resumed")
    train_on(*NAMES)
    assert all(applied()[name] > before[name] for name in NAMES)

    for command in (*agents.values(), hub):
        command.signal(signal.SIGTERM)
        assert (command.wait(), command.stderr) == (0, ""), str(command)
    stopped = hub.wait_for("stopped")
    replayed = commands.run("replay", "run-hub", "--json")
    assert replayed.returncode == 0, replayed.stderr
    summary = json.loads(replayed.stdout.splitlines()[-1])
    model, version = load_model(commands.folder / "run-hub" / MODEL_FILE, MODEL.spec)
    assert summary["model_xxh3"] == f"{checksum(model.data):016x}"
    assert summary["version"] == stopped["version"] == version
    assert summary["updates_applied"] == stopped["updates_applied"]
