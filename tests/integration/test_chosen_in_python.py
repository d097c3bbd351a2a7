"""`output=`, `train=` and `freeze=` choose of an ONNX model, in Python as by the command's flags."""

import re
import shlex

import numpy as np
import onnx
import pytest
from onnx import parser

from edgeasync import Agent, Hub, Stop, nn, train
from edgeasync.errors import ConfigError, GraphError, arguments
from edgeasync.training.numpy_models import SoftmaxModel
from tests.support.models.gradients import forward, numbers
from tests.support.programs.command_line import GRAPH

X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
Y = (X[:, :1] > 0).astype(np.float32)
TEXT = "h = Gemm(x, body, bias)\nr = Relu(h)\nz = MatMul(r, head)\ny = Sigmoid(z)"
ENDS_IN_SIGMOID = forward(
    TEXT, {"body": numbers((3, 4), 1), "bias": numbers((4,), 2), "head": numbers((4, 1), 3)}, (3,)
)
LAYERS = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def two_heads():
    """Return a model with two layers as outputs, so that the one to train must be chosen."""
    text = """<ir_version: 9, opset_import: ["" : 18]> two_heads (float[batch, 3] x) =>
        (float[batch, 1] z, float[batch, 1] other) <float[3, 1] w = {1, 2, 3}, float[3, 1] v = {3, 2, 1}>
        { z = MatMul(x, w) other = MatMul(x, v) }"""
    return parser.parse_model(text)


def written(tmp_path, proto=None):
    path = tmp_path / "model.onnx"
    onnx.save(proto or onnx.load_model_from_string(ENDS_IN_SIGMOID), path)
    return path


def by_hub(model, tmp_path, **chosen):
    with Hub(model, run=tmp_path / "run", bind="tcp://127.0.0.1:*", loss="bce_with_logits", **chosen) as hub:
        with Agent(hub.address, (X, Y)) as agent:
            hub.wait_for(1)
            agent.stop()
        return set(hub.snapshot())


def by_train(model, tmp_path, **chosen):
    how = {"workers": 2, "until": Stop(updates=2), "run": tmp_path / "run", "loss": "bce_with_logits"}
    return set(train(model, (X, Y), **how, **chosen).arrays)


def by_peers(model, tmp_path, **chosen):
    return by_train(model, tmp_path, topology="ring", **chosen)


WAYS = {"train": by_train, "Hub": by_hub, "ring": by_peers}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("chosen", "trained"),
    [
        ({}, {"body", "bias", "head"}),
        ({"train": ["head"]}, {"head"}),
        ({"train": "b*"}, {"body", "bias"}),
        ({"freeze": ["body", "bias"]}, {"head"}),
        ({"train": ["b*", "head"], "freeze": "bias"}, {"body", "head"}),
    ],
    ids=["unsaid", "one", "a pattern", "not these", "both"],
)
def test_what_is_chosen_is_trained(way, chosen, trained, tmp_path):
    assert way(written(tmp_path), tmp_path, output="z", **chosen) == trained


@pytest.mark.parametrize("way", [by_train, by_peers], ids=["train", "ring"])
def test_layers_are_chosen_by_the_same_arguments(way, tmp_path):
    assert way(LAYERS, tmp_path, train=["2.*"]) == {"2.weight", "2.bias"}


def test_a_hub_of_layers_is_chosen_by_the_same_arguments(tmp_path):
    assert by_hub(LAYERS, tmp_path, freeze="0.*", input_shape=(3,)) == {"2.weight", "2.bias"}


def refused(use):
    """Return what a refusal says, in one line, and nothing if there is none."""
    try:
        use()
    except GraphError as error:
        return str(error)
    return ""


def test_a_refusal_can_be_followed_in_python_and_at_the_command(tmp_path, commands):
    path, told, flags = written(tmp_path, two_heads()), {}, []
    how = {"loss": "bce_with_logits", "workers": 1, "until": Stop(updates=1)}
    while said := refused(lambda: train(path, (X, Y), **how, **told)):  # noqa: B023
        assert "--" not in said
        before, told = told, arguments(said)
        assert told != before, said
    assert told == {"output": "z"}
    while (answer := commands.run("model", "check", path, "--loss", "bce_with_logits", *flags)).returncode:
        assert answer.returncode == GRAPH
        assert "output=" not in answer.stderr
        before, flags = flags, shlex.split(re.search(r"--output '\w+'", answer.stderr)[0])
        assert flags != before, answer.stderr
    assert flags == ["--output", "z"]


@pytest.mark.parametrize("name", ["output", "train", "freeze"])
def test_a_model_that_is_no_graph_has_nothing_to_choose(name, tmp_path):
    model = SoftmaxModel(inputs=3, classes=2)
    with pytest.raises(ConfigError, match=f"{name} requires an ONNX model or layers of edgeasync.nn"):
        train(model, (X, Y[:, 0]), **{name: "a"})
    with pytest.raises(
        ConfigError,
        match=f"unknown key `{name}`; the hub's settings define it with the model; a device without a hub",
    ):
        Agent("tcp://127.0.0.1:1", (X, Y), **{name: "a"})
    with pytest.raises(ConfigError, match=f"`?{name}`?"):
        train(written(tmp_path), (X, Y), loss="bce_with_logits", **{name: 3})
    with pytest.raises(ConfigError, match="use the arguments model, loss, output, train, freeze"):
        train(written(tmp_path), (X, Y), settings={"model": {name: "a"}})
