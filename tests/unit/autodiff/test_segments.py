"""Training graphs that compute their layers twice: the same gradients, with one layer in memory at a time."""

import re
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest

from edgeasync.autodiff import segments
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import forward, numbers
from tests.support.models.language_models import language_model
from tests.unit.autodiff.test_recompute import peak_bytes

WIDTH, TOKENS = 8, 6


def transformer(layers):
    """Layers of attention with a mask that all of them read, and dropout."""
    text, parameters = "n = Abs(x)\nmask = Less(n, tiny)\na0 = MatMul(x, first)\n", {
        "first": numbers((WIDTH, WIDTH), 1), "tiny": np.float32(0.01), "low": np.float32(-9.0),
        "ratio": np.float32(0.3),
    }  # fmt: skip
    for place in range(layers):
        text += f"""
            l{place} = LayerNormalization(a{place}, s{place}, b{place})
            q{place} = MatMul(l{place}, w{place})
            k{place} = Transpose<perm=[0, 2, 1]>(l{place})
            d{place} = MatMul(q{place}, k{place})
            e{place} = Softmax(d{place})
            v{place} = MatMul(e{place}, l{place})
            m{place} = Where(mask, low, v{place})
            r{place} = Add(a{place}, m{place})
            o{place} = Dropout(r{place}, ratio)
            u{place} = MatMul(o{place}, i{place})
            g{place} = Gelu(u{place})
            t{place} = MatMul(g{place}, j{place})
            a{place + 1} = Add(r{place}, t{place})
        """
        for name, shape in (("w", (WIDTH, WIDTH)), ("i", (WIDTH, 2 * WIDTH)), ("j", (2 * WIDTH, WIDTH)),
                            ("s", (WIDTH,)), ("b", (WIDTH,))):  # fmt: skip
            parameters[f"{name}{place}"] = 0.3 * numbers(shape, 10 * place + ord(name))
    return f"{text}y = MatMul(a{layers}, first)", parameters, (TOKENS, WIDTH)


def unet(depth):
    """Convolutions with batch norms, and long connections from the first half to the second."""
    text, parameters = "c0 = Conv<pads=[1, 1, 1, 1]>(x, k)\n", {"k": numbers((4, 2, 3, 3), 1)}
    for place in range(2 * depth):
        text += f"""
            h{place} = Conv<pads=[1, 1, 1, 1]>(c{place}, k{place})
            n{place} = BatchNormalization(h{place}, s, s, m{place}, v{place})
            p{place} = Sigmoid(n{place})
            z{place} = Mul(p{place}, n{place})
            f{place} = Conv<pads=[1, 1, 1, 1]>(z{place}, k{place})
            c{place + 1} = {f"Add(f{place}, c{2 * depth - place})" if place >= depth + 2 else f"Tanh(f{place})"}
        """
        parameters[f"k{place}"] = 0.3 * numbers((4, 4, 3, 3), 20 + place)
        parameters |= {f"m{place}": np.zeros(4, np.float32), f"v{place}": np.ones(4, np.float32)}
    parameters["s"] = numbers((4,), 3, positive=True)
    return f"{text}y = Conv(c{2 * depth}, k)", parameters | {"k": numbers((4, 4, 1, 1), 2)}, (4, 6, 6)


MODELS = {"transformer": (transformer(4), 20), "unet": (unet(4), 18)}


def build(model, *, recompute, batch="batch", opset=20, **settings):
    text, parameters, shape = model
    text = "\n".join(line for line in text.splitlines() if line.strip())
    content = forward(text, parameters, shape, batch=batch, opset=opset)
    return build_training_graph(content, GraphSettings(loss="mse", recompute=recompute, **settings))


def run(graph, shape, order, path=None):
    """Run two steps with the same random numbers, and return the second's results."""
    options = onnxruntime.SessionOptions()
    options.execution_order = order
    options.log_severity_level = 4
    if path is not None:
        options.optimized_model_filepath = str(path)
    session = onnxruntime.InferenceSession(graph.model, options, ["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_outputs()]
    size = [3, *next(entry.shape for entry in session.get_inputs() if entry.name == "target")[1:]]
    feeds = {"x": numbers((3, *shape), 1), "target": numbers(size, 2)} | graph.spec.views(graph.initial)
    onnxruntime.set_seed(7)
    session.run(names, feeds)
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("order", [onnxruntime.ExecutionOrder.PRIORITY_BASED, onnxruntime.ExecutionOrder.DEFAULT])
@pytest.mark.parametrize("batch", ["batch", 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_the_same_to_the_last_bit(name, batch, order):
    model, opset = MODELS[name]
    once, twice = [
        run(build(model, recompute=recompute, batch=batch, opset=opset), model[2], order)
        for recompute in (False, True)
    ]
    assert once.keys() == twice.keys()
    for key, value in once.items():
        np.testing.assert_array_equal(twice[key], value, err_msg=key)
        assert np.isfinite(value).all()


@pytest.mark.parametrize("name", MODELS)
def test_a_step_needs_less_memory(name):
    model, opset = MODELS[name]
    once, twice = [build(model, recompute=recompute, opset=opset) for recompute in (False, True)]
    assert peak_bytes(twice) < 0.6 * peak_bytes(once)


def test_another_layer_needs_only_the_memory_of_its_input():
    four, eight = [peak_bytes(build(transformer(layers), recompute=True)) for layers in (4, 8)]
    more = peak_bytes(build(transformer(8), recompute=False)) - peak_bytes(build(transformer(4), recompute=False))
    assert eight - four < 0.3 * more


def test_the_last_layers_of_a_deep_model_are_computed_again_too(monkeypatch):
    """Their cuts are not crowded out by the many places with the same bytes in the layers before."""
    depth = 8
    monkeypatch.setattr(segments, "PLACES_MAX", segments.PLACES_MAX * depth // 40)
    content = language_model(layers=depth, vocabulary=80, tokens=8).SerializeToString()
    settings = GraphSettings(recompute=True, base="int8", lora="2:*.q_proj,*.v_proj")
    model = build_training_graph(content, settings).model
    names = " ".join(node.name for node in onnx.load_model_from_string(model).graph.node)
    again = {int(layer) for layer in re.findall(r"again/model\.layers\.(\d+)", names)}
    assert again >= {*range(depth - 1)}


def test_onnxruntime_keeps_the_second_computation(tmp_path):
    counts = []
    for recompute in (False, True):
        file = tmp_path / "optimized.onnx"
        run(build(transformer(4), recompute=recompute), (TOKENS, WIDTH), onnxruntime.ExecutionOrder.DEFAULT, file)
        counts.append(Counter(node.op_type for node in onnx.load(file).graph.node))
    more = counts[1] - counts[0]
    assert more["Softmax"] >= 3  # the last layer is not computed again
    assert counts[1]["Dropout"] == 4


def test_only_what_gradients_pass_through_is_computed_again():
    """With a frozen first half, its layers are neither kept nor computed again."""
    model = transformer(8)
    part = [f"{name}{place}" for place in range(4, 8) for name in "wij"]
    once, twice = [build(model, recompute=recompute, train=part) for recompute in (False, True)]
    count = [Counter(node.op_type for node in onnx.load_model_from_string(graph.model).graph.node)["Softmax"]
             for graph in (once, twice)]  # fmt: skip
    assert count[0] == 8
    assert count[0] < count[1] <= count[0] + 4


def test_a_single_layer_has_nothing_to_compute_again():
    graph = build(("y = MatMul(x, w)", {"w": numbers((WIDTH, 2), 1)}, (WIDTH,)), recompute=True)
    assert np.isfinite(run(graph, (WIDTH,), onnxruntime.ExecutionOrder.DEFAULT)["w.grad"]).all()
