"""`edgeasync model` and `edgeasync export`: what they print, what they write, and where they refuse."""

import json
import signal

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy

from edgeasync import nn
from edgeasync.runtime.graph_model import FORWARD_FILE
from edgeasync.runtime.model_file import MODEL_FILE
from tests.support.command_line import CONFIG, FILES, GRAPH, MISMATCH, mistake
from tests.support.graphs import forward_model
from tests.support.processes import trained

pytestmark = pytest.mark.process


@pytest.fixture
def forward(commands):
    path = commands.folder / "forward.onnx"
    path.write_bytes(forward_model())
    return path


def say(commands, *arguments):
    """Run a command that succeeds; return what it printed."""
    told = commands.run(*arguments)
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    return told.stdout


def run_model(content, x):
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


# -- what goes well --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["model"], ["model", "build"], ["model", "inspect"], ["model", "check"], ["export"]]
)
def test_help(commands, command):
    told = say(commands, *command, "--help")
    assert "--help" in told
    assert "--json" in told or command == ["model"]


def test_a_graph_is_built_inspected_and_checked(commands, forward):
    out = commands.folder / "new" / "training.onnx"
    assert "195 parameters" in say(commands, "model", "build", forward, "--out", out)
    values = safetensors.numpy.load_file(out.with_suffix(".safetensors"))
    assert {name: value.shape for name, value in values.items()} == {
        "body.weight": (8, 16), "body.bias": (16,), "head.weight": (16, 3), "head.bias": (3,),
    }  # fmt: skip
    onnx.checker.check_model(onnx.load(out), full_check=True)
    found = json.loads(say(commands, "model", "inspect", out, "--json"))
    assert (found["parameters"], found["batch_size"], found["file_bytes"]) == (195, 32, out.stat().st_size)
    assert found["arrays"][0] == {"name": "body.weight", "shape": [8, 16], "role": "trained"}
    assert found["floating_point_operations"] > 3 * 2 * 32 * (8 * 16 + 16 * 3) - 2 * 32 * 8 * 16
    told = json.loads(say(commands, "model", "check", out, "--json"))
    assert told["passed"]
    assert {check["name"] for check in told["gradients"]} == set(values)


def test_what_people_read(commands, forward):
    """Long names stay whole on a narrow screen."""
    name = "a.rather.long.path." * 8 + "weight"
    model = onnx.load(forward)
    model.graph.node[0].input[1] = model.graph.initializer[0].name = name
    onnx.save(model, forward)
    told = say(commands, "model", "inspect", forward, "--batch-size", 5)
    assert f"{name}  8 x 16  128     trained" in told.splitlines()
    assert "input x: N x 8" in told.replace("batch", "N")
    assert "a step of 5 examples" in told
    rows = [line.split() for line in say(commands, "model", "check", forward).splitlines()]
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        (name, "ok"), ("body.bias", "ok"), ("head.weight", "ok"), ("head.bias", "ok"),
    ]  # fmt: skip


def test_patterns_choose_what_is_trained(commands, forward):
    def arrays(*flags):
        found = json.loads(say(commands, "model", "inspect", forward, "--json", *flags))
        return [array["name"] for array in found["arrays"]], found["frozen"]

    assert arrays("--train", "head.*") == (["head.weight", "head.bias"], 8 * 16 + 16)
    assert arrays("--train", "head.*", "--train", "body.bias") == (["body.bias", "head.weight", "head.bias"], 128)
    assert arrays("--freeze", "*.bias") == (["body.weight", "head.weight"], 19)
    assert arrays("--loss", "mse", "--output", "h")[0] == ["body.weight", "body.bias"]


def test_a_fixed_batch_is_told(commands, forward):
    model = onnx.load(forward)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 6
    onnx.save(model, forward)
    assert json.loads(say(commands, "model", "inspect", forward, "--json"))["batch_size"] == 6
    assert json.loads(say(commands, "model", "check", forward, "--json"))["passed"]


def test_a_run_is_exported(commands):
    """What a hub and an agent have trained, batch norm and dropout included, runs anywhere."""
    layers = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    nn.save(layers, commands.folder / "forward.onnx", (8,))
    hub = commands.start("hub", "--model", "forward.onnx", "--bind", "tcp://127.0.0.1:*", "--run", "run", "--json")
    address = hub.wait_for("listening")["detail"]
    data = commands.data("pi.npz", examples=120)
    commands.agent(address, "pi", data=data, step_s=0.0)
    trained(address, 60, "pi")
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0
    told = json.loads(say(commands, "export", "run", "--out", "new/trained.onnx", "--json"))
    assert told == {"model": "new/trained.onnx", "arrays": 7}

    content = (commands.folder / "new" / "trained.onnx").read_bytes()
    onnx.checker.check_model(content, full_check=True)
    values = safetensors.numpy.load_file(commands.folder / "run" / MODEL_FILE)
    x = np.load(data)["x"]
    normed = (x @ values["0.weight"].T - values["1.running_mean"]) / np.sqrt(values["1.running_var"] + 1e-5)
    hidden = np.maximum(normed * values["1.weight"] + values["1.bias"], 0)
    scores = hidden @ values["4.weight"].T + values["4.bias"]
    np.testing.assert_allclose(run_model(content, x), scores, rtol=1e-4, atol=1e-5)
    assert np.mean(np.argmax(scores, 1) == np.load(data)["y"]) > 0.9
    assert "7 trained arrays" in say(commands, "export", "run", "--model", "forward.onnx", "--out", "again.onnx")
    assert (commands.folder / "again.onnx").read_bytes() == content


# -- what a person gets wrong ----------------------------------------------------------------------------------


def test_settings_that_are_none(commands, forward):
    for command in (["build", "--out", "t.onnx"], ["inspect"], ["check"]):
        arguments = ["model", command[0], forward, *command[1:]]
        losses = ["--loss 'guess'", "cross_entropy, mse, l1, huber, bce_with_logits"]
        mistake(commands, CONFIG, *losses, arguments=[*arguments, "--loss", "guess"])
        mistake(commands, CONFIG, "--target", "label, input", arguments=[*arguments, "--target", "none"])
        hint = ["'tail.*'", "head.weight, head.bias"]
        mistake(commands, GRAPH, *hint, arguments=[*arguments, "--train", "tail.*"])
        mistake(commands, GRAPH, *hint, arguments=[*arguments, "--freeze", "tail.*"])
        mistake(commands, GRAPH, "'tail'", "scores", arguments=[*arguments, "--output", "tail"])
        mistake(commands, GRAPH, "none chosen", arguments=[*arguments, "--freeze", "*"])


def test_a_training_graph_in_place_of_a_forward_model_and_the_other_way_round(commands, forward):
    say(commands, "model", "build", forward, "--out", "training.onnx")
    arguments = ["model", "build", "training.onnx", "--out", "again.onnx"]
    mistake(commands, CONFIG, "training.onnx", "give the forward model", arguments=arguments)
    for command in ("inspect", "check"):
        arguments = ["model", command, "training.onnx", "--train", "head.*"]
        mistake(commands, CONFIG, "train would change nothing", arguments=arguments)
    (commands.folder / "training.safetensors").unlink()
    mistake(commands, CONFIG, "training.safetensors", arguments=["model", "inspect", "training.onnx"])
    (commands.folder / "training.safetensors").write_bytes(b"torn")
    mistake(commands, CONFIG, "training.safetensors", arguments=["model", "check", "training.onnx"])
    run_folder(commands, {})
    arguments = ["export", "run", "--model", "training.onnx", "--out", "out.onnx"]
    mistake(commands, GRAPH, "training graph", "give the forward model", arguments=arguments)


def test_files_that_cannot_be_read_or_written(commands, forward):
    (commands.folder / "torn.onnx").write_bytes(b"torn")
    for command in (["inspect"], ["check"], ["build", "--out", "t.onnx"]):
        for file, code, words in (
            ("none.onnx", CONFIG, "no such file"),
            ("torn.onnx", GRAPH, "not a readable"),
            (".", CONFIG, "irectory"),
        ):
            mistake(commands, code, words, arguments=["model", command[0], file, *command[1:]])
    for out, code, words in (
        ("torn.onnx/t.onnx", FILES, "cannot be written"),
        ("forward.onnx", CONFIG, "the forward model itself"),
        ("t.safetensors", CONFIG, "training.onnx"),
    ):
        mistake(commands, code, out, words, arguments=["model", "build", forward, "--out", out])
    assert forward.read_bytes() == forward_model()


def run_folder(commands, values, forward=None):
    run = commands.folder / "run"
    run.mkdir(exist_ok=True)
    (run / MODEL_FILE).write_bytes(safetensors.numpy.save(values))
    if forward is not None:
        (run / FORWARD_FILE).write_bytes(forward)


def test_runs_that_cannot_be_exported(commands):
    arguments = ["export", "run", "--out", "out.onnx"]
    mistake(commands, CONFIG, "forward.onnx", "--model", arguments=arguments)
    bias = np.zeros(3, np.float32)
    run_folder(commands, {"head.bias": bias, "tail": bias}, forward_model())
    mistake(commands, MISMATCH, "'tail'", MODEL_FILE, FORWARD_FILE, arguments=arguments)
    run_folder(commands, {"head.bias": np.zeros(4, np.float32)})
    mistake(commands, MISMATCH, "'head.bias'", "(4,)", "(3,)", arguments=arguments)
    run_folder(commands, {"head.bias": bias + np.nan})
    mistake(commands, GRAPH, "'head.bias'", "diverged", arguments=arguments)
    mistake(commands, CONFIG, "the forward model itself", arguments=["export", "run", "--out", "run/forward.onnx"])
    (commands.folder / "run" / MODEL_FILE).unlink()
    mistake(commands, FILES, MODEL_FILE, "no such file", arguments=arguments)
    assert not (commands.folder / "out.onnx").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["model", "build", "--out", "t.onnx"],
        ["model", "inspect"],
        ["model", "check"],
        ["export", "--out", "o.onnx"],
    ],
)
def test_without_the_package_onnx(commands, forward, arguments):
    """A meta path hook that finds no onnx, as on a device."""
    program = """
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "onnx":
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
sys.meta_path.insert(0, Missing())
from edgeasync.cli.main import main
main()
"""
    run_folder(commands, {}, forward.read_bytes())
    place = "run" if arguments[0] == "export" else forward
    command = commands.start(*arguments, place, program=("-c", program))
    assert command.wait() == CONFIG
    assert command.lines == []
    (line,) = command.stderr.splitlines()
    assert "pip install 'edgeasync[hub]'" in line
