"""`edgeasync model` and `edgeasync export`: what they print, what they write, and where they refuse."""

import json
import shutil
import signal
import time
from datetime import UTC, datetime

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from onnx import numpy_helper

from edgeasync import Parameter, ParameterSpec, nn
from edgeasync.core.hub.events import Evaluated
from edgeasync.durable.run_folder import BEST_FILE, FORWARD_FILE, MODEL_FILE
from edgeasync.graphs.model_file import save_model
from tests.support.models.graphs import forward_model
from tests.support.parts.small_runs import ANYWHERE
from tests.support.programs.command_line import CONFIG, FILES, GRAPH, MISMATCH, assert_told, mistake
from tests.support.programs.processes import LIVELINESS, Commands, status_when, trained, without_onnx

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


def test_a_graph_is_built_inspected_and_checked(commands, forward):
    out = commands.folder / "new" / "training.onnx"
    assert "195 parameters" in say(commands, "model", "build", forward, "--out", out)
    values = safetensors.numpy.load_file(out.with_suffix(".safetensors"))
    assert {name: value.shape for name, value in values.items()} == {
        "body.weight": (8, 16), "body.bias": (16,), "head.weight": (16, 3), "head.bias": (3,),
    }  # fmt: skip
    onnx.checker.check_model(onnx.load(out), full_check=True)
    found = json.loads(say(commands, "model", "inspect", out, "--json"))["training"]
    assert (found["parameters"], found["step"]["examples"]) == (195, 32)
    assert found["graph_bytes"] == out.stat().st_size
    assert found["arrays"][0] == {"name": "body.weight", "shape": [8, 16], "role": "trained"}
    told = json.loads(say(commands, "model", "check", out, "--json"))
    assert told["passed"]
    assert {check["name"] for check in told["gradients"]} == set(values)


def test_what_people_read(commands, forward):
    """Long names stay whole on a narrow screen."""
    name = "a.rather.long.path." * 8 + "weight"
    model = onnx.load(forward)
    model.graph.node[0].input[1] = model.graph.initializer[0].name = name
    onnx.save(model, forward)
    told = say(commands, "model", "inspect", forward, "--batch-size", 5, "--parameters").splitlines()
    facts = dict(line.split("  ", 1) for line in told[:8])
    assert [*facts] == ["inputs", "outputs", "trained", "values", "graph", "exchange", "step", "memory"]
    assert facts["inputs"].strip() == "x float32 N x 8"
    assert facts["trained"].strip() == "scores with cross_entropy, target int64 batch"
    assert facts["values"].strip() == "195 trained, 0 running statistics, 0 frozen"
    assert (
        facts["exchange"].strip()
        == "780 bytes up (identity), 199 bytes down (int8); 390 bytes when joining (float16); "
        "4 bytes a value on loopback"
    )
    assert "for 5 examples on 1 core" in facts["step"]
    assert f"{name}  8 x 16  128     trained" in told
    assert len(say(commands, "model", "inspect", forward).splitlines()) == 8
    rows = [line.split() for line in say(commands, "model", "check", forward).splitlines()]
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        (name, "ok"), ("body.bias", "ok"), ("head.weight", "ok"), ("head.bias", "ok"),
    ]  # fmt: skip


def test_a_file_that_does_not_train_is_still_described(commands):
    """The facts are on standard output, the reason on standard error, with the exit code of a graph."""
    text = """<ir_version: 9, opset_import: ["" : 18]>
        g (float[batch, 3] x) => (float[batch, 3] y) <float[3] a = {1, 2, 3}, float[3] b = {1, 2, 3}>
        { h = Mul(x, a) m = Hardmax(h) y = Mul(m, b) }"""
    onnx.save(onnx.parser.parse_model(text), commands.folder / "hard.onnx")
    told = commands.run("model", "inspect", "hard.onnx")
    assert_told(told, GRAPH, "no gradient for Hardmax", "--freeze 'a'")
    assert [line.split(None, 1) for line in told.stdout.splitlines()] == [
        ["inputs", "x float32 batch x 3"],
        ["outputs", "y float32 batch x 3"],
        ["weights", "6 float32 values"],
        ["operators", "2 Mul, 1 Hardmax"],
        ["no", "gradient  1 Hardmax"],
        ["try", "edgeasync model inspect hard.onnx --freeze a"],
    ]
    told = commands.run("model", "inspect", "hard.onnx", "--json")
    found = json.loads(told.stdout)
    assert (told.returncode, found["training"], found["flags"]) == (GRAPH, None, ["--freeze", "a"])
    assert found["problem"] in told.stderr
    say(commands, "model", "inspect", "hard.onnx", *found["flags"])


def test_what_only_zeros_were_compared_of_is_not_ok(commands):
    text = """<ir_version: 9, opset_import: ["" : 18]>
        g (float[batch, 3] x) => (float[batch, 3] y) <float[3] w = {1, 2, 3}, float[3] dead = {-90, -90, -90}>
        { h = Add(x, dead) r = Relu(h) m = Mul(x, w) y = Add(m, r) }"""
    path = commands.folder / "dead.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    *rows, last = say(commands, "model", "check", path, "--loss", "mse").splitlines()
    assert [row.split()[-1] for row in rows[1:]] == ["ok", "zeros"]
    assert last.startswith("only zeros, nothing to compare: dead. All their gradients are 0")
    told = json.loads(say(commands, "model", "check", path, "--loss", "mse", "--json"))
    assert told["passed"]
    assert [check["compared"] for check in told["gradients"]] == [True, False]


def test_a_warning_of_a_command_names_flags(commands, forward):
    """One layer's weight is in a Constant node, beside weights that are not."""
    model = onnx.load(forward)
    (head,) = [entry for entry in model.graph.initializer if entry.name == "head.weight"]
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["head.weight"], value=head))
    model.graph.initializer.remove(head)
    onnx.save(model, forward)
    sentence = "weights in Constant nodes are not trained: head.weight; to train them, set --train '*' --train "
    assert f"warning: {sentence}'head.weight'" in say(commands, "model", "inspect", forward)
    assert json.loads(say(commands, "model", "inspect", forward, "--json"))["warnings"][0].startswith(sentence)
    told = commands.run("hub", "--model", forward, "--run", commands.folder / "run", "--check")
    assert sentence in told.stderr
    followed = say(commands, "model", "inspect", forward, "--json", "--train", "*", "--train", "head.weight")
    assert json.loads(followed)["warnings"] == []


def test_what_a_build_chooses_is_a_note(commands, forward):
    """Nothing is wrong with a file that ends in a softmax."""
    model = onnx.load(forward)
    model.graph.node.append(onnx.helper.make_node("Softmax", ["scores"], ["shares"], axis=1))
    model.graph.output[0].name = "shares"
    onnx.save(model, forward)
    sentence = "output 'shares' comes from Softmax; cross_entropy trains the scores before it, 'scores'"
    for command in (("inspect",), ("check",), ("build", "--out", "graph.onnx")):
        lines = say(commands, "model", command[0], forward, *command[1:]).splitlines()
        assert [line.startswith(f"note: {sentence}") for line in lines].count(True) == 1
        assert not any("warning" in line for line in lines)
        found = json.loads(say(commands, "model", command[0], forward, *command[1:], "--json"))
        assert found["warnings"] == []
        assert [note.startswith(sentence) for note in found["notes"]] == [True]
    told = commands.run("hub", "--model", forward, "--run", commands.folder / "run", "--check")
    assert f"note: {sentence}" in told.stderr


def run_of_one(commands, model, updates, flags=()):
    """Train a model with one agent, until the hub is stopped. Return the hub and the agent's data."""
    hub = commands.start("hub", "--model", model, "--bind", ANYWHERE, "--run", "run", "--json", *flags)
    address = hub.wait_for("listening")["detail"]
    data = commands.data("pi.npz", examples=120)
    commands.agent(address, "pi", data=data, step_s=0.0)
    trained(address, updates, "pi")
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0
    return hub, data


def test_a_run_is_exported(commands):
    """What a hub and an agent have trained, batch norm and dropout included, runs anywhere."""
    layers = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    nn.save(layers, commands.folder / "forward.onnx", (8,))
    hub, data = run_of_one(commands, "forward.onnx", updates=60)
    told = json.loads(say(commands, "export", "run", "--out", "new/trained.onnx", "--json"))
    stopped = hub.wait_for("stopped")
    assert (told["model"], told["arrays"], told["version"]) == ("new/trained.onnx", 7, stopped["version"])
    assert (told["evaluation"], told["remarks"]) == (None, [])

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


# -- exporting while a hub is at work, and after it was killed ---------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run whose hub was killed long before its next checkpoint, and what was said while it was at work."""
    with Commands(tmp_path_factory.mktemp("killed")) as commands:
        (commands.folder / "forward.onnx").write_bytes(forward_model())
        data = commands.data("data.npz", examples=120)
        more = f'[evaluation]\ndata = "{data}"\nevery = "10 updates"\n[checkpoint]\nevery = "1 hour"\n'
        settings = commands.settings(model='kind = "onnx"\nfile = "forward.onnx"', more=LIVELINESS + more)
        hub, address = commands.hub(settings)
        commands.agent(address, "pi", data=data, step_s=0.0)
        commands.status = status_when(address, lambda status: status["updates_applied"] >= 60 and status["best"])
        commands.live = json.loads(say(commands, "export", "run-hub", "--out", "live.onnx", "--json"))
        hub.kill()
        commands.x, commands.y = (np.load(data)[name] for name in ("x", "y"))
        yield commands


def accuracy(commands, name):
    """Return the share of the examples that an exported model gets right."""
    scores = run_model((commands.folder / name).read_bytes(), commands.x)
    return float(np.mean(np.argmax(scores, 1) == commands.y))


def metadata_of(commands, name):
    """Return what an exported model says of itself, as any runtime shows it."""
    session = onnxruntime.InferenceSession(commands.folder / name, providers=["CPUExecutionProvider"])
    return session.get_modelmeta().custom_metadata_map


def values_of(path):
    """Return the bytes of a model's values, by name."""
    return {entry.name: numpy_helper.to_array(entry).tobytes() for entry in onnx.load(path).graph.initializer}


def replayed(commands, run, *flags):
    """Return what `replay` says at its end, and the values that it exports."""
    out = commands.folder / "replayed.safetensors"
    lines = say(commands, "replay", run, "--export", out, "--json", *flags).splitlines()
    return json.loads(lines[-1]), {
        name: value.tobytes() for name, value in safetensors.numpy.load_file(out).items()
    }


def test_a_hub_at_work_has_its_newest_version_exported(killed):
    """Of what its folder holds by itself, a checkpoint and model.safetensors, nothing is trained yet."""
    status, told = killed.status, killed.live
    assert accuracy(killed, "forward.onnx") < 0.7
    assert accuracy(killed, "live.onnx") > 0.9
    # Who asks the hub is shown what is in memory: the newest update of its only device may not be on disk yet.
    assert told["version"] >= status["version"] - 1 > 0
    assert told["lineage"] == status["lineage"]
    assert told["evaluation"]["version"] <= told["version"]
    assert time.time() - 600 < told["time"] < time.time()


def test_the_newest_version_of_a_killed_run_is_exported_to_the_bit(killed):
    told = json.loads(say(killed, "export", "run-hub", "--out", "killed.onnx", "--json"))
    summary, values = replayed(killed, "run-hub")
    assert told["version"] == summary["version"] >= killed.live["version"]
    assert values_of(killed.folder / "killed.onnx") == values
    for name, load in (("killed.safetensors", safetensors.numpy.load_file), ("killed.npz", np.load)):
        told = json.loads(say(killed, "export", "run-hub", "--out", name, "--json"))
        assert told["version"] == summary["version"]
        found = load(killed.folder / name)
        assert {name: found[name].tobytes() for name in found} == values
    last = summary["evaluation"]
    assert told["evaluation"]["version"] == last["version"]
    assert told["evaluation"]["accuracy"] == last["accuracy"]
    made = datetime.fromtimestamp(told["time"], UTC).isoformat(timespec="seconds")
    assert metadata_of(killed, "killed.onnx") == {
        "edgeasync.version": str(told["version"]),
        "edgeasync.lineage": summary["lineage"],
        "edgeasync.time": made,
        "edgeasync.evaluated_version": str(last["version"]),
        "edgeasync.loss": repr(told["evaluation"]["loss"]),
        "edgeasync.accuracy": repr(last["accuracy"]),
    }


def test_people_read_which_version_was_exported(killed):
    told = say(killed, "export", "run-hub", "--out", "killed.onnx")
    summary, _ = replayed(killed, "run-hub")
    first, second = told.splitlines()
    assert first == "killed.onnx: 4 trained arrays of run-hub"
    version, made = second.split(",")[0].split(" of ")
    assert version == f"version {summary['version']}"
    assert datetime.fromisoformat(made).tzinfo is not None
    assert f"accuracy {summary['evaluation']['accuracy']:.2%}, loss " in second


@pytest.mark.parametrize("kept", ["as it was", "missing", "an older one", "of a branch that was left"])
def test_the_best_version_is_exported(killed, tmp_path, kept):
    """Also where the hub was killed before the best was in its file, or a branch with a better one was left."""
    run = tmp_path / "run"
    shutil.copytree(killed.folder / "run-hub", run)
    best = replayed(killed, run)[0]["best"]
    file = run / BEST_FILE
    if kept == "missing":
        file.unlink()
    elif kept != "as it was":
        loss, lineage = (9.0, killed.status["lineage"]) if kept == "an older one" else (0.0, "f" * 16)
        spec = ParameterSpec((Parameter("head.bias", (3,)),))
        evaluation = Evaluated(1, loss, 1.0 if loss == 0.0 else 0.0)
        save_model(file, spec, np.ones(3, np.float32), lineage=lineage, version=1, evaluation=evaluation)
    told = json.loads(say(killed, "export", run, "--out", "best.onnx", "--best", "--json"))
    assert told["version"] == told["evaluation"]["version"] == best["version"]
    assert told["evaluation"]["accuracy"] == best["accuracy"]
    assert accuracy(killed, "best.onnx") == best["accuracy"]
    entry = next(
        line["entry"]
        for line in map(json.loads, say(killed, "replay", run, "--json").splitlines())
        if line.get("version") == best["version"]
    )
    assert values_of(killed.folder / "best.onnx") == replayed(killed, run, "--until", entry)[1]


def test_a_hub_without_a_journal_has_its_last_checkpoint_exported_and_that_is_told(commands, forward):
    more = LIVELINESS + '[evaluation]\nevery = "1000000 updates"\n[checkpoint]\nevery = "1 hour"\n'
    model, durability = 'kind = "onnx"\nfile = "forward.onnx"', 'durability = "checkpoint"'
    settings = commands.settings(model=model, hub=durability, more=more)
    hub, address = commands.hub(settings)
    commands.agent(address, "pi")
    trained(address, 5, "pi")
    told = json.loads(say(commands, "export", "run-hub", "--out", "out.onnx", "--json"))
    assert told["version"] == 0
    assert "a hub without a journal is running here" in told["remarks"][0]
    hub.signal(signal.SIGTERM)
    assert hub.wait() == 0
    told = json.loads(say(commands, "export", "run-hub", "--out", "out.onnx", "--json"))
    assert (told["version"], told["remarks"]) == (hub.wait_for("stopped")["version"], [])
    mistake(
        commands,
        CONFIG,
        "no version has been evaluated",
        "--best",
        arguments=["export", "run-hub", "--out", "b.onnx", "--best"],
    )


# -- what a person gets wrong ----------------------------------------------------------------------------------


def test_settings_that_are_none(commands, forward):
    for command in (["build", "--out", "t.onnx"], ["inspect"], ["check"]):
        arguments = ["model", command[0], forward, *command[1:]]
        losses = ["--loss: 'guess' is not known", "bce_with_logits, cross_entropy, huber, l1, mse"]
        mistake(commands, CONFIG, *losses, arguments=[*arguments, "--loss", "guess"])
        mistake(commands, CONFIG, "--target", "input, label", arguments=[*arguments, "--target", "none"])
        hint = ["'tail.*'", "head.weight, head.bias"]
        mistake(commands, GRAPH, *hint, arguments=[*arguments, "--train", "tail.*"])
        mistake(commands, GRAPH, *hint, arguments=[*arguments, "--freeze", "tail.*"])
        mistake(commands, GRAPH, "'tail'", "scores", arguments=[*arguments, "--output", "tail"])
        mistake(commands, GRAPH, "no parameter is selected", arguments=[*arguments, "--freeze", "*"])


def test_a_training_graph_in_place_of_a_forward_model_and_the_other_way_round(commands, forward):
    say(commands, "model", "build", forward, "--out", "training.onnx")
    arguments = ["model", "build", "training.onnx", "--out", "again.onnx"]
    mistake(commands, CONFIG, "training.onnx", "pass the forward model", arguments=arguments)
    for command in ("inspect", "check"):
        arguments = ["model", command, "training.onnx", "--train", "head.*"]
        mistake(commands, CONFIG, "train has no effect", arguments=arguments)
    (commands.folder / "training.safetensors").unlink()
    mistake(commands, CONFIG, "training.safetensors", arguments=["model", "inspect", "training.onnx"])
    (commands.folder / "training.safetensors").write_bytes(b"torn")
    mistake(commands, CONFIG, "training.safetensors", arguments=["model", "check", "training.onnx"])
    run_folder(commands, {})
    arguments = ["export", "run", "--model", "training.onnx", "--out", "out.onnx"]
    mistake(commands, GRAPH, "training graph", "pass the forward model", arguments=arguments)


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
        ("forward.onnx", CONFIG, "is also an input file"),
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
    mistake(commands, FILES, "run: no such folder", arguments=arguments)
    (commands.folder / "run").mkdir()
    mistake(
        commands, CONFIG, "out.onnx: only ONNX and edgeasync.nn models", "out.npz", "--model", arguments=arguments
    )
    for name in ("out.pt", "out"):
        mistake(commands, CONFIG, name, ".onnx, .safetensors or .npz", arguments=["export", "run", "--out", name])
    arrays_alone = ["export", "run", "--model", "forward.onnx", "--out", "out.npz"]
    mistake(commands, CONFIG, "remove --model", arguments=arrays_alone)
    bias = np.zeros(3, np.float32)
    run_folder(commands, {"head.bias": bias, "tail": bias}, forward_model())
    mistake(commands, MISMATCH, "'tail'", MODEL_FILE, FORWARD_FILE, arguments=arguments)
    run_folder(commands, {"head.bias": np.zeros(4, np.float32)})
    mistake(commands, MISMATCH, "'head.bias'", "(4,)", "(3,)", arguments=arguments)
    run_folder(commands, {"head.bias": bias + np.nan})
    mistake(commands, GRAPH, "'head.bias'", "diverged", arguments=arguments)
    mistake(
        commands, CONFIG, "is inside the input folder", arguments=["export", "run", "--out", "run/forward.onnx"]
    )
    (commands.folder / "run" / MODEL_FILE).unlink()
    mistake(commands, FILES, MODEL_FILE, "no such file", arguments=arguments)
    assert not (commands.folder / "out.onnx").exists()


def test_a_model_that_is_read_is_not_written_over(commands, forward):
    content = forward.read_bytes()
    run_folder(commands, {}, content)
    badly_named = commands.folder / "named.safetensors"
    badly_named.write_bytes(content)
    (commands.folder / "folder.onnx").mkdir()
    build = ["model", "build", forward, "--out"]
    mistake(
        commands, CONFIG, "is also an input file", arguments=["model", "build", badly_named, "--out", "named.onnx"]
    )
    mistake(commands, CONFIG, "folder.onnx: is a folder", arguments=[*build, "folder.onnx"])
    export = ["export", "run", "--model", forward, "--out"]
    mistake(commands, CONFIG, "forward.onnx: is also an input file", arguments=[*export, "forward.onnx"])
    for place in (f"run/{MODEL_FILE}", "run/new.onnx", "run/new/new.onnx"):
        mistake(commands, CONFIG, place, "is inside the input folder run", arguments=[*export, place])
    assert forward.read_bytes() == badly_named.read_bytes() == content


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
    program = without_onnx(commands)
    run_folder(commands, {}, forward.read_bytes())
    place = "run" if arguments[0] == "export" else forward
    command = commands.start(*arguments, place, program=("-c", program))
    assert command.wait() == CONFIG
    assert command.lines == []
    (line,) = command.stderr.splitlines()
    assert "pip install 'edgeasync[hub]'" in line
