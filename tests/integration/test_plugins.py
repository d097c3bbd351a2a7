"""Policies and a codec of another package, with real processes: installed, killed, uninstalled, reinstalled."""

import hashlib
import json
import signal

import pytest

from tests.support.programs.command_line import CONFIG
from tests.support.programs.packages import ROOT, Environment, make_wheel
from tests.support.programs.processes import LIVELINESS, MODEL_TABLE, trained

pytestmark = pytest.mark.process

POLICY = """
[policy]
staleness = { kind = "hinge", free = 2.0 }
combine = { kind = "own_policy:Krum", faulty = 0 }
aggregate = { kind = "buffered", count = 3 }
[codec]
push = "own_bytes+zstd"
[checkpoint]
every = "30 updates"
"""


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


def content(folder):
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()
    }


def test_a_run_outlives_kills_and_the_absence_of_its_package(commands, environment, tmp_path):
    wheel = make_wheel(ROOT / "examples" / "own_policy", tmp_path)
    environment.install(wheel)
    python = {"python": environment.python}
    listed = json.loads(environment.run(tmp_path, "policies", "--json").stdout)
    kinds = {kind["kind"]: kind["code"] for kind in listed if kind["package"] == "own-policy 1.0"}
    assert kinds == {"hinge": "own_policy:Hinge", "krum": "own_policy:Krum", "own_bytes": "own_policy:Bytes"}

    settings = commands.settings(model=MODEL_TABLE, more=LIVELINESS + POLICY)
    hub, address = commands.hub(settings, **python)
    agents = [commands.agent(address, name, **python) for name in ("a", "b")]
    run = tmp_path / "run-hub"
    for _ in range(2):
        trained(address, 40)
        hub.kill()
        table = json.loads((run / "hub.json").read_bytes())
        assert table["policy"]["staleness"] == {"kind": "own_policy:Hinge", "free": 2.0, "slope": 10.0}
        hub = commands.start("hub", "--resume", run, "--bind", address, "--json", **python)
        assert "journal entries" in hub.wait_for("resumed")["detail"]
        hub.wait_for("listening")
    status = trained(address, 20)
    assert {device["push_codec"] for device in status["devices"]} == {"own_bytes+zstd"}
    hub.kill()

    environment.uninstall("own-policy")
    before, plain = content(run), commands.settings(name="plain")
    missing = "plugin own_policy:Hinge: no module 'own_policy'"
    for command, name in (
        (
            ["hub", "--resume", run],
            "policy.staleness: plugin own_policy:Hinge: only the run's folder names this code",
        ),
        (["hub", "--resume", run, "--trust-code"], f"policy.staleness: {missing}"),
        (["hub", settings], "polynomial; if it is a plugin's, install its package"),
        (["hub", plain, "--run", run], "only the run's folder names this code"),
        (["replay", run, "--trust-code"], missing),
    ):
        refused = environment.run(tmp_path, *command)
        assert refused.returncode == CONFIG
        assert name in refused.stderr
        assert content(run) == before
    read = environment.run(tmp_path, "replay", run)
    assert read.returncode == 0
    assert "plugins own_policy:Hinge, own_policy:Krum, own_bytes, which are not imported" in read.stdout
    environment.install(wheel)
    hub = commands.start("hub", "--resume", run, "--bind", address, "--json", **python)
    hub.wait_for("listening")
    trained(address, 20)
    for process in (*agents, hub):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert environment.run(tmp_path, "replay", run, "--trust-code").returncode == 0
