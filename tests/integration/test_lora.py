"""LoRA in a fleet: adapters are trained, exchanged or kept on a device, and exported."""

import json
import signal

import numpy as np
import onnx
import pytest
import safetensors.numpy

from edgeasync import Agent, Hub, Run, Stop, nn, train
from edgeasync.callbacks import ExchangeEvent
from edgeasync.durable.run_folder import FORWARD_FILE, MODEL_FILE
from edgeasync.errors import ConfigError, ModelMismatchError, StorageError
from edgeasync.parameters import Parameter, ParameterSpec
from edgeasync.policies.optimizers import SGD
from edgeasync.protocol.codecs import make_codec
from edgeasync.training.numpy_models import SoftmaxModel
from tests.integration.test_model_command import run_model, run_of_one, say
from tests.support.models.language_models import language_model
from tests.support.parts.small_runs import ANYWHERE, plain
from tests.support.programs.command_line import CONFIG, FILES, MISMATCH, mistake
from tests.support.programs.processes import until

pytestmark = pytest.mark.process

LAYERS = ("0.lora_A.weight", "0.lora_B.weight")


def test_a_prebuilt_graph_is_trained_and_exported_in_both_ways(commands):
    """The training graph names its adapters, so the forward model without them suffices for an export."""
    nn.save(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), commands.folder / "base.onnx", (8,))
    say(commands, "model", "build", "base.onnx", "--lora", "2:0", "--train", "2.bias", "--out", "graph.onnx")
    _, data = run_of_one(commands, "graph.onnx", updates=20)
    say(commands, "export", "run", "--model", "base.onnx", "--out", "tuned.onnx")
    values = safetensors.numpy.load_file(commands.folder / "run" / MODEL_FILE)
    assert {*values} == {*LAYERS, "2.bias"}
    assert all(np.abs(values[name]).max() > 0.01 for name in LAYERS)
    base = {
        entry.name: onnx.numpy_helper.to_array(entry)
        for entry in onnx.load(commands.folder / "base.onnx").graph.initializer
    }
    x = np.load(data)["x"]
    first = base["0.weight"] + 16 / 2 * values[LAYERS[1]] @ values[LAYERS[0]]
    hidden = np.maximum(x @ first.T + base["0.bias"], 0)
    scores = hidden @ base["2.weight"].T + values["2.bias"]
    content = (commands.folder / "tuned.onnx").read_bytes()
    np.testing.assert_allclose(run_model(content, x), scores, rtol=1e-4, atol=1e-5)

    say(commands, "export", "run", "--peft", "--model", "base.onnx", "--out", "tuned")
    config = json.loads((commands.folder / "tuned/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 16, ["0"])
    assert config["modules_to_save"] == ["2"]
    kept = safetensors.numpy.load_file(commands.folder / "tuned/adapter_model.safetensors")
    expected = values | {"2.weight": base["2.weight"]}
    assert {*kept} == {f"base_model.model.{name}" for name in expected}
    for name, value in expected.items():
        np.testing.assert_array_equal(kept[f"base_model.model.{name}"], value)
    told = commands.run("export", "run", "--peft", "--out", "again")
    assert told.returncode == 2
    assert "--peft: run has no ONNX model; pass the forward model with --model" in told.stderr


@pytest.mark.parametrize(
    "other", [{"base": True}, {"lora": "3:0"}, {"lora": "2:2"}], ids=["base", "rank", "layer"]
)
def test_another_model_leaves_a_run_as_it_was(other, tmp_path):
    """A hub that is refused changes no file, so that the run goes on with its own model."""
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    own, another = (nn.to_onnx(network, (4,), seed=seed) for seed in range(2))
    settings = {"run": tmp_path, "bind": ANYWHERE}
    with Hub(own, lora="2:0", **settings) as hub:
        before = hub.snapshot()
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    wrong = Hub(another if "base" in other else own, lora=other.get("lora", "2:0"), frozen="warn", **settings)
    with pytest.raises(ModelMismatchError, match="this run was started with another model, base or choice"):
        wrong.start()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    with Hub(own, lora="2:0", **settings) as hub:
        for name, array in hub.snapshot().items():
            np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("prebuilt", [False, True], ids=["forward", "prebuilt"])
def test_adapters_are_merged_into_their_own_base_alone(prebuilt, commands):
    """A run that was started with a forward model stores it. With a prebuilt graph, the export needs `--model`."""
    network = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 3))
    for seed, name in enumerate(("base.onnx", "other.onnx")):
        nn.save(network, commands.folder / name, (8,), seed=seed)
    files = {name: (commands.folder / name).read_bytes() for name in ("base.onnx", "other.onnx")}
    flags = ["--lora", "2:0", "--train", "2.bias", "--base", "int8"]
    if prebuilt:
        say(commands, "model", "build", "base.onnx", *flags, "--out", "graph.onnx")
        run_of_one(commands, "graph.onnx", updates=2)
    else:
        run_of_one(commands, "base.onnx", updates=2, flags=flags)
        say(commands, "export", "run", "--out", "own.onnx")
    wrong = ["export", "run", "--model", "other.onnx", "--out"]
    own = f"the model that {commands.folder / 'graph.onnx'} was built from" if prebuilt else "base.onnx"
    words = "other.onnx: the frozen values differ from those of ", f"{own}, which run was trained on"
    mistake(commands, MISMATCH, *words, arguments=[*wrong, "tuned.onnx"])
    mistake(commands, MISMATCH, *words, arguments=[*wrong, "tuned", "--peft"])
    say(commands, "export", "run", "--model", "base.onnx", "--out", "tuned.onnx")
    say(commands, "export", "run", "--model", "base.onnx", "--out", "tuned", "--peft")
    for name in ("base.onnx", "graph.onnx", "graph.safetensors") if prebuilt else ("base.onnx",):
        model = ["--model", "base.onnx"] if name.endswith(".onnx") else []
        mistake(commands, CONFIG, "is also an input file", arguments=["export", "run", *model, "--out", name])
    if prebuilt:
        mistake(commands, CONFIG, "is also an input", arguments=["replay", "run", "--export", "graph.safetensors"])
    assert {name: (commands.folder / name).read_bytes() for name in files} == files
    if not prebuilt:
        forward = commands.folder / "run" / FORWARD_FILE
        forward.write_bytes(forward.read_bytes().replace(b"Relu", b"Tanh"))
        mistake(commands, FILES, "damaged or edited", arguments=["export", "run", "--out", "damaged.onnx"])
        with pytest.raises(StorageError, match="damaged or edited"):
            Run.open(commands.folder / "run").export(commands.folder / "damaged.onnx")
        assert not (commands.folder / "damaged.onnx").exists()


def test_a_run_that_was_resumed_still_knows_its_base(commands):
    nn.save(nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 3)), commands.folder / "base.onnx", (8,))
    nn.save(nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 3)), commands.folder / "other.onnx", (8,), seed=1)
    run_of_one(commands, "base.onnx", updates=2, flags=["--lora", "2:0", "--base", "int8"])
    hub = commands.start("hub", "--resume", "run", "--json")
    hub.wait_for("listening")
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0
    mistake(
        commands, MISMATCH, f"those of {commands.folder / 'base.onnx'}, which run was trained on",
        arguments=["export", "run", "--model", "other.onnx", "--out", "tuned.onnx"],
    )  # fmt: skip
    mistake(commands, CONFIG, "is also an input file", arguments=["export", "run", "--out", "base.onnx"])
    say(commands, "export", "run", "--model", "base.onnx", "--out", "tuned.onnx")
    with pytest.raises(ConfigError, match=r"base\.onnx: is also an input file"):
        Run.open(commands.folder / "run").export(commands.folder / "base.onnx")


def test_devices_keep_their_own_half_of_the_adapters(tmp_path):
    """No one adapter serves both, but both share `A`."""
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    opposite = (x, x[:, 0] > 0), (x, x[:, 0] < 0)
    base = nn.to_onnx(nn.Linear(4, 2), (4,), seed=0)
    hub = Hub(base, lora=2, local=["*lora_B*"], run=tmp_path, bind=ANYWHERE, optimizer=SGD(learning_rate=0.1))
    with (
        hub,
        Agent(hub.address, opposite[0], name="left") as left,
        Agent(hub.address, opposite[1], name="right") as right,
    ):
        until(lambda: min(left.updates_answered, right.updates_answered) >= 20, "20 answers each")
        assert {*hub.snapshot()} == {*LAYERS}
        assert not hub.snapshot()["0.lora_B.weight"].any()
        for agent, data in zip((left, right), opposite, strict=True):
            assert agent.evaluate(data).accuracy > 0.9


def test_python_exports_adapters_as_the_command_does(commands, tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    run = train(network, (x, x[:, 0] > 0), lora="2:0", run=tmp_path / "run", until=Stop(updates=20))
    assert run.export(tmp_path / "python", peft=True) == tmp_path / "python"
    Run.open(tmp_path / "run").export(tmp_path / "opened", peft=True)
    say(commands, "export", tmp_path / "run", "--peft", "--out", tmp_path / "command")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        contents = {(tmp_path / way / file).read_bytes() for way in ("python", "opened", "command")}
        assert len(contents) == 1
    plain = train(network, (x, x[:, 0] > 0), until=Stop(updates=1))
    with pytest.raises(ConfigError, match="the model has no LoRA adapters for PEFT"):
        plain.export(tmp_path / "plain", peft=True)
    arrays = train(SoftmaxModel(inputs=4, classes=2), (x, x[:, 0] > 0), until=Stop(updates=1))
    with pytest.raises(ConfigError, match="peft=True needs a run whose hub trained LoRA adapters"):
        arrays.export(tmp_path / "arrays", peft=True)


def coded_bytes(arrays):
    """Return the size of arrays in int8, with their scales."""
    spec = ParameterSpec(tuple([Parameter(name, array.shape) for name, array in arrays.items()]))
    return make_codec("int8", spec).payload_bytes_max


@pytest.mark.parametrize("sizes", [{}, {"layers": 4, "hidden": 192, "intermediate": 384}], ids=["toy", "middle"])
def test_an_exchange_costs_little_more_than_the_adapters(sizes, tmp_path):
    """The base travels once, and then adapters alone, in one byte per value."""
    words = np.random.default_rng(0).integers(0, 500, (40, 17))
    model = language_model(vocabulary=512, tokens=16, **sizes)

    found = []
    hub = Hub(
        model, base="int4", lora="8:*.q_proj,*.v_proj", run=tmp_path, bind=ANYWHERE, batch_size=1,
        policy=plain(local_steps=1), until=Stop(updates=25), settings={"codec": {"push": "int8"}},
    )  # fmt: skip
    with hub, Agent(hub.address, (words[:, :-1], words[:, 1:]), name="pi", callbacks=[found.append]) as agent:
        agent.wait()
    first, *later = [event for event in found if isinstance(event, ExchangeEvent)]
    assert len(later) >= 20
    assert first.bytes_down > 10 * np.median([event.bytes_down for event in later])
    adapters_bytes = coded_bytes(Run.open(tmp_path).arrays)
    for nbytes in ([event.bytes_up for event in later], [event.bytes_down for event in later]):
        whole = [count for count in nbytes if count >= adapters_bytes]
        assert len(whole) > len(nbytes) / 2, "an answer before the fold has no model"
        assert np.mean(whole) <= 1.05 * adapters_bytes
