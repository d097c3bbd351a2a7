"""Sessions run the nodes of a training graph in its order, which needs the least memory."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.errors import GraphError
from edgeasync.graphs.split_base import split_base
from edgeasync.training import onnx_session
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import forward, numbers

LAYERS = 4


def test_the_gradient_of_a_layer_precedes_that_of_the_layer_before(tmp_path, monkeypatch):
    """Otherwise the gradients of all activations would be kept until the end."""

    def profiled():
        options = onnxruntime.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        return options

    monkeypatch.setattr(
        onnx_session, "onnxruntime", SimpleNamespace(**{**vars(onnxruntime), "SessionOptions": profiled})
    )
    text, parameters = ["h0 = Identity(x)"], {}
    for layer in range(LAYERS):
        text += [f"a{layer} = MatMul(h{layer}, w{layer})", f"h{layer + 1} = Tanh(a{layer})"]
        parameters[f"w{layer}"] = numbers((5, 5), layer)
    text.append(f"y = Neg(h{LAYERS})")
    graph = build_training_graph(forward("\n".join(text), parameters, (5,)), GraphSettings(loss="mse"))
    session = onnx_session.open_session(graph.model, 1, "cpu")
    x = numbers((3, 5), 9)
    session.run(None, {"x": x, "target": x, **graph.spec.views(graph.initial)})
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    ran = [event["name"].removesuffix("_kernel_time") for event in events if event["cat"] == "Node"]
    places = {name: place for place, name in enumerate(ran) if "Gemm" in name}
    weights = [max(place for name, place in places.items() if f"a{layer}" in name) for layer in range(LAYERS)]
    assert weights == sorted(weights, reverse=True)
    for layer in range(1, LAYERS):
        earlier = min(place for name, place in places.items() if f"a{layer - 1}" in name)
        assert weights[layer] < earlier


WEIGHTS = {
    "q": np.ones((64, 48), np.int8),
    "s": np.full((2, 48), 0.5, np.float32),
    "z": np.ones((2, 48), np.int8),
    "p": np.ones(64, np.float32),
}


def dequantizing(*, axis=0, block_size=32, **changed):
    """Return the training graph of a quantized layer, with changes that only a malicious hub would make."""
    text = "w = DequantizeLinear<axis=0, block_size=32>(q, s, z)\nh = Mul(x, p)\ny = MatMul(h, w)"
    settings = GraphSettings(loss="mse", train=("p",))
    proto = onnx.load_from_string(build_training_graph(forward(text, WEIGHTS, (64,), opset=21), settings).model)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if node.op_type == "DequantizeLinear":
                attribute.i = {"axis": axis, "block_size": block_size}[attribute.name]
    for entry in proto.graph.initializer:
        if entry.name in changed:
            entry.CopyFrom(numpy_helper.from_array(changed[entry.name], entry.name))
    return proto.SerializeToString()


def run(graph):
    check_graph(graph, bytes_max=1 << 20)
    session = onnx_session.open_session(graph, 1, "cpu")
    feeds = {"x": np.ones((2, 64), np.float32), "target": np.ones((2, 48), np.float32), "p": WEIGHTS["p"]}
    try:
        return session.run(["loss"], feeds)
    except Exception as error:
        raise onnx_session.explain(error) from error


MALFORMED = {
    "few scales": {"s": np.ones((2, 7), np.float32)},
    "many scales": {"s": np.ones((4, 48), np.float32)},
    "scales of one axis": {"s": np.ones(48, np.float32)},
    "few zero points": {"z": np.ones((1, 48), np.int8)},
    "zero points of another type": {"z": np.ones((2, 48), np.uint8)},
    "zero points for all scales": {"z": np.ones((), np.int8)},
    "an axis that does not exist": {"axis": 2},
    "small blocks": {"block_size": 1},
    "no blocks": {"block_size": 0},
    "negative blocks": {"block_size": -32},
    "large blocks": {"block_size": 1 << 31},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_malformed_quantized_weights_are_refused(change):
    assert run(dequantizing())
    with pytest.raises(GraphError):
        run(dequantizing(**change))


def test_activations_are_not_rounded_where_weights_are_quantized():
    weight = np.random.default_rng(0).integers(-127, 128, (96, 64)).astype(np.int8)
    parameters = {"q": weight, "s": np.full(64, 0.01, np.float32)}
    model = forward("w = DequantizeLinear<axis=1>(q, s)\ny = MatMul(x, w)", parameters, (96,))
    x = numbers((5, 96))
    (found,) = onnx_session.open_session(model, 1, "cpu").run(None, {"x": x})
    np.testing.assert_allclose(found, x @ (weight * np.float32(0.01)), rtol=1e-5, atol=1e-5)


def test_float32_constants_are_counted_wherever_their_values_are(tmp_path):
    weights = {"w": numbers((600, 800), 0), "v": numbers((800, 5), 1), "b": numbers((5,), 2)}
    text = "h = MatMul(x, w)\nr = Relu(h)\na = MatMul(r, v)\ny = Add(a, b)"
    graph = build_training_graph(forward(text, weights, (600,)), GraphSettings(loss="mse", train=("b",)))
    constants = 4 * (600 * 800 + 800 * 5)
    nbytes = onnx_session.float_bytes(graph.model)
    assert constants <= nbytes < constants + 100  # and scalars of the loss
    split = split_base(graph.model, tmp_path)
    assert split.base is not None
    assert onnx_session.float_bytes(split.graph) == nbytes
    changed = onnx.load_from_string(graph.model)
    (large,) = [entry for entry in changed.graph.initializer if list(entry.dims) == [600, 800]]
    large.CopyFrom(numpy_helper.from_array(np.ones((600, 800), np.int8), large.name))
    assert onnx_session.float_bytes(changed.SerializeToString()) == nbytes - 4 * 600 * 800


@pytest.mark.parametrize(("bytes_max", "disabled"), [(1 << 30, False), (100, True)])
def test_only_constants_of_small_graphs_are_packed(monkeypatch, bytes_max, disabled):
    monkeypatch.setattr(onnx_session, "PACKED_BYTES_MAX", bytes_max)
    text = forward("h = MatMul(x, w)\ny = Add(h, b)", {"w": numbers((8, 8), 0), "b": numbers((8,), 2)}, (8,))
    graph = build_training_graph(text, GraphSettings(loss="mse", train=("b",)))
    options = onnx_session.open_session(graph.model, 1, "cpu").get_session_options()
    if disabled:
        assert options.get_session_config_entry("session.disable_prepacking") == "1"
    else:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry("session.disable_prepacking")
