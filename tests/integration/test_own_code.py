"""Code of a user's own on daemons: `--trainer` and `[model] kind = "custom"`, from this machine alone."""

import asyncio
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgeasync import Agent, Run
from edgeasync.config import convert, read_toml
from edgeasync.runtime.hosted_model import HostedModel
from edgeasync.runtime.hub_settings import HubSettings
from edgeasync.runtime.hub_start import make_hub
from tests.support.programs.command_line import CONFIG, DATA, MISMATCH, assert_told, mistake
from tests.support.programs.processes import LIVELINESS, PATIENCE_S, trained

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SAFE = ("-P", "-m", "edgeasync")
"""As the installed command: Python does not put the current folder on the path."""

TABLE = 'kind = "custom"\nfactory = "forecast:model"'

MISTAKES = """
import os
from edgeasync import Parameter, ParameterSpec, SGD, GradientTrainer
from edgeasync.errors import DataError
import numpy as np

SPEC = ParameterSpec((Parameter("w", (2,)),))
number = 3

def nothing(*_): return None
def integers(): return {"w": np.arange(2)}
def empty(): return {}
def other_shape(): return SPEC, {"w": np.zeros(3)}
def other_name(): return SPEC, {"v": np.zeros(2)}
def vector(): return SPEC, np.zeros(2, np.float32)
def short(): return SPEC, np.zeros(1, np.float32)
def no_step(welcome, data): return ParameterSpec
def refuses(welcome, data): raise DataError("no temperatures in it")
def other(welcome, data): return GradientTrainer(SPEC, None, [SGD()], iter(()))
"""


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """A folder of modules: this process and those that it starts find it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "mistakes.py").write_text(MISTAKES)
    (folder / "lacking.py").write_text("import not_there\n")
    path = [str(folder), str(ROOT / "examples"), str(ROOT)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    for place in path:
        monkeypatch.syspath_prepend(place)
    return folder


def sensor_data(commands, seed):
    from forecast.readings import windows  # noqa: PLC0415 - the fixture makes it importable

    x, y = windows(seed)
    np.savez(commands.folder / f"sensor-{seed}.npz", x=x, y=y)
    return commands.folder / f"sensor-{seed}.npz"


def test_a_fleet_of_daemons_trains_a_model_of_the_users_own(commands, importable):
    settings = commands.settings(model=TABLE, more=f"[local]\nbatch_size = 64\n{LIVELINESS}")
    hub, address = commands.hub(settings, program=SAFE)
    told = []
    for seed in (1, 2):
        flags = ["--trainer", "forecast:trainer", "--spool", "full"]
        agent = commands.agent(
            address, f"sensor-{seed}", *flags, data=sensor_data(commands, seed), step_s=0.0, program=SAFE
        )
        assert agent.wait_for("started")["detail"] == "1000 examples, start 1, trainer forecast:trainer"
        told.append(agent)
    trained(address, 40, "sensor-2")
    told[0].kill()
    again = commands.agent(address, "sensor-1", *flags, data=sensor_data(commands, 1), step_s=0.0, program=SAFE)
    again.wait_for("joined")
    trained(address, 40, "sensor-1")
    for process in (again, told[1], hub):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.events[-1]["event"] in ("stopped", "best")
    assert (commands.folder / "sensor-1" / "spool.safetensors").exists()
    run = commands.folder / "run-hub"
    arrays = Run.open(run).arrays
    from forecast.readings import windows  # noqa: PLC0415

    x, y = windows(99)
    assert 0.8 < np.mean(y < x @ arrays["weight"] + arrays["bias"]) < 0.97, "nine of ten readings are below"

    resumed = commands.start(
        "hub", "--resume", run, "--trust-code", "--bind", "tcp://127.0.0.1:*", "--json", program=SAFE
    )
    assert "version" in resumed.wait_for("resumed")["detail"]
    resumed.signal(signal.SIGTERM)
    assert resumed.wait() == 0
    for command in (["runs", "."], ["replay", run, "--export", "w.safetensors"], ["hub", "--check", settings]):
        assert commands.run(*command).returncode == 0
    hint = "for the arrays alone use x.safetensors or x.npz"
    mistake(commands, CONFIG, hint, arguments=["export", "run-hub", "--out", "x.onnx"])
    told = commands.run("export", "run-hub", "--out", "x.npz", "--json")
    newest = load_file(run / "model.safetensors")
    with np.load(commands.folder / "x.npz") as exported:
        assert {name: array.tolist() for name, array in exported.items()} == {
            name: array.tolist() for name, array in newest.items()
        }
    assert json.loads(told.stdout)["version"] > 20
    hint = "edgeasync hub --check"
    for command in ("inspect", "check"):
        mistake(commands, CONFIG, hint, arguments=["model", command, "forecast:model"])


def test_the_examples_settings_name_its_model(importable):
    spec, initial = read_toml(ROOT / "examples" / "forecast" / "hub.toml", HubSettings).model.load()
    assert [parameter.name for parameter in spec.parameters] == ["weight", "bias"]
    assert initial.shape == (5,)


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("forecast", ["does not name code", "package.module:factory"]),
        ("no_such_module:model", ["no module 'no_such_module'", "PYTHONPATH", "current folder is not searched"]),
        ("forecast.nothing:model", ["no module 'forecast.nothing'"]),
        ("lacking:model", ["needs not_there"]),
        ("mistakes:nowhere", ["mistakes has no 'nowhere'"]),
        ("mistakes:number", ["is int, not a function"]),
    ],
)
def test_a_name_that_leads_nowhere_is_told_by_hub_and_agent(commands, importable, name, hints):
    settings = commands.settings(model=f'kind = "custom"\nfactory = "{name}"')
    mistake(commands, CONFIG, *hints, arguments=["hub", settings])
    agent = ["agent", "--hub", "tcp://127.0.0.1:1", "--device-id", "pi", "--state", "state", "--trainer", name]
    mistake(commands, CONFIG, *hints, arguments=agent)


@pytest.mark.parametrize(
    ("factory", "hint"),
    [
        ("nothing", "returned NoneType; return named arrays"),
        ("integers", "parameter 'w' is int64; only floats"),
        ("empty", "has no parameters"),
        ("other_shape", "array 'w' has shape (3,), expected (2,)"),
        ("other_name", "array 'v' is not part of this model"),
        ("short", "expected a flat float32 vector of 2 values"),
    ],
)
def test_a_factory_of_no_model_is_told(commands, importable, factory, hint):
    settings = commands.settings(model=f'kind = "custom"\nfactory = "mistakes:{factory}"')
    mistake(commands, CONFIG, f"mistakes:{factory}", hint, arguments=["hub", settings])


def test_held_out_data_cannot_be_given_to_code_that_the_hub_cannot_run(commands, importable):
    settings = commands.settings(model=TABLE, more='[evaluation]\ndata = "held-out.npz"\n')
    mistake(commands, CONFIG, "evaluation.data", "the devices' losses", arguments=["hub", settings])


def test_a_trainer_that_does_not_fit_is_told(commands, importable):
    _, address = commands.hub(commands.settings(model=TABLE))
    cases = [
        ("mistakes:nothing", CONFIG, ["returned NoneType; return a trainer with spec, begin and step"]),
        ("mistakes:no_step", CONFIG, ["returned StructMeta; return a trainer"]),
        ("mistakes:refuses", DATA, ["no temperatures in it"]),
        ("mistakes:other", MISMATCH, ["'w' (2,), trained, here, 'weight' (4,), trained, there"]),
        (None, CONFIG, ["start this agent with its own trainer (--trainer), such as 'package.module:factory'"]),
    ]
    for trainer, code, hints in cases:
        flags = ["--data", commands.data("d.npz")] if trainer is None else ["--trainer", trainer]
        told = commands.run("agent", "--hub", address, "--device-id", "pi", "--state", "state", *flags)
        assert_told(told, code, *hints)


def test_the_current_folder_is_not_searched(commands, importable, monkeypatch):
    """The installed command looks into its installation and PYTHONPATH, wherever it is run."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (commands.folder / "here.py").write_text("def model(): return {}\n")
    hub = commands.start("hub", commands.settings(model='kind = "custom"\nfactory = "here:model"'), program=SAFE)
    assert hub.wait() == CONFIG
    assert "no module 'here'" in hub.stderr


@pytest.mark.asyncio
async def test_a_hub_cannot_name_code_to_its_agents(commands, importable, monkeypatch):
    """A hub that does: an agent without a trainer refuses it, one with its own runs that; neither imports."""
    (importable / "evil.py").write_text("open('was-imported', 'w')\n")
    model = {"kind": "custom", "factory": "evil:factory"}
    run = {"run": str(commands.folder / "run"), "bind": "tcp://127.0.0.1:*"}
    table = {"hub": run, "model": {"kind": "custom", "factory": "forecast:model"}}
    listens = asyncio.Event()
    hub = make_hub(convert(table, HubSettings, where="here"), lambda _: listens.set())
    training = {"model": model, "trainer": "evil:factory", "local": {"batch_size": 8}}
    monkeypatch.setattr(HostedModel, "training", lambda *_: training)
    running = asyncio.create_task(hub.run())
    async with asyncio.timeout(PATIENCE_S):
        await listens.wait()
        plain = commands.agent(hub.address, "plain")
        assert await asyncio.to_thread(plain.wait) == CONFIG
        assert "the hub's settings" in plain.stderr
        data = sensor_data(commands, 1)
        own = commands.agent(hub.address, "own", "--trainer", "forecast:trainer", data=data)
        await asyncio.to_thread(own.wait_for, "joined")
        await asyncio.to_thread(trained, hub.address, 2)
        hub.request_stop()
        await running
    assert not list(commands.folder.rglob("was-imported"))


def test_an_agent_in_python_takes_the_name_too(commands, importable):
    _, address = commands.hub(commands.settings(model=TABLE, hub="stop = { updates = 5 }"))
    with Agent(
        address, str(sensor_data(commands, 1)), trainer="forecast:trainer", state=commands.folder / "a"
    ) as agent:
        assert agent.wait() == "the hub has finished training"
