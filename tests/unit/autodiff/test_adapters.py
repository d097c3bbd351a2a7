"""LoRA: adapters train beside frozen layers, stored in any way, and merge into what the file stores."""

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeasync.autodiff.adapters import LORA, adapt
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.check import check_gradients
from edgeasync.autodiff.export import export_model
from edgeasync.autodiff.layers import find_layers
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.config import convert
from edgeasync.errors import ConfigError, GraphError
from edgeasync.lora import LoRA
from tests.support.models.gradients import forward, numbers, run, session

EVERY_LAYER = """
c = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(x, conv.weight, conv.bias)
t = Tanh(c)
o = Conv(t, point.weight)
f = Flatten(o)
turned = Transpose<perm=[1, 0]>(q.weight)
q = MatMul(f, turned)
s = Sigmoid(q)
m = MatMul(s, plain)
g = Gemm<transB=1>(m, fc.weight, fc.bias)
h = Gemm<beta=2.0>(g, last.weight, last.bias)
n = Mul(h, scale)
y = MatMul(n, n_weight)
"""
WEIGHTS = {
    "conv.weight": numbers((3, 2, 3, 3), 1),
    "conv.bias": numbers((3,), 2),
    "point.weight": numbers((4, 3, 1, 1), 3),
    "q.weight": numbers((5, 16), 4),
    "plain": numbers((5, 6), 5),
    "fc.weight": numbers((7, 6), 6),
    "fc.bias": numbers((7,), 7),
    "last.weight": numbers((7, 4), 8),
    "last.bias": numbers((4,), 9),
    "scale": numbers((4,), 10),
    "n_weight": numbers((4, 4), 11),
}
LAYERS = ("conv", "point", "q", "plain", "fc", "last", "n_weight")
X = numbers((6, 2, 4, 4), 20)


def written(text, weights, x, **kinds):
    """Return a model whose weights have dots in their names, which onnx's parser does not read."""
    hidden = {name: name.replace(".", "DOT") for name in weights}
    for name, other in hidden.items():
        text = text.replace(name, other)
    content = forward(text, {hidden[name]: value for name, value in weights.items()}, x, **kinds)
    proto = onnx.load_model_from_string(content)
    shown = {other: name for name, other in hidden.items()}
    for node in proto.graph.node:
        node.input[:] = [shown.get(name, name) for name in node.input]
    for entry in proto.graph.initializer:
        entry.name = shown[entry.name]
    return proto.SerializeToString()


def model(**kinds):
    return written(EVERY_LAYER, WEIGHTS, (2, 4, 4), **kinds)


def build(content, **settings):
    return build_training_graph(content, GraphSettings(loss="mse", **settings))


def predict(content):
    (found,) = session(content).run(None, {"x": X})
    return found


def moved(built):
    """Return values for the adapters, as after training."""
    shapes = {parameter.name: parameter.shape for parameter in built.spec.parameters}
    return {name: 0.3 * numbers(shape, seed) for seed, (name, shape) in enumerate(shapes.items(), 50)}


def filled(content, arrays):
    """Return a model with other initializers, and its adapters as they are."""
    proto = onnx.load_model_from_string(content)
    for entry in proto.graph.initializer:
        if entry.name in arrays:
            entry.CopyFrom(numpy_helper.from_array(arrays[entry.name], entry.name))
    return proto.SerializeToString()


def quantized(content, names):
    """Store weights as int8 with a scale per row, and return also the weights dequantized."""
    proto = onnx.load_model_from_string(content)
    floats = {}
    nodes = []
    for name in names:
        entry = next(entry for entry in proto.graph.initializer if entry.name == name)
        weight = numpy_helper.to_array(entry)
        scale = np.abs(weight).max(axis=tuple(range(1, weight.ndim))) / 127
        shape = (-1, *[1] * (weight.ndim - 1))
        stored = np.round(weight / scale.reshape(shape)).astype(np.int8)
        floats[name] = stored.astype(np.float32) * scale.reshape(shape)
        proto.graph.initializer.remove(entry)
        proto.graph.initializer.extend(
            [
                numpy_helper.from_array(stored, f"{name}_quantized"),
                numpy_helper.from_array(scale, f"{name}_scale"),
            ]
        )
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_quantized", f"{name}_scale"], [name], axis=0))
    nodes += [*proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto.SerializeToString(), floats


def test_adapters_start_at_the_model_of_the_file_and_have_right_gradients():
    built = build(model(), lora=LoRA(rank=2, alpha=6.0, seed=3))
    assert [parameter.name for parameter in built.spec.parameters] == [
        f"{layer}.lora_{part}.weight" for layer in LAYERS for part in "AB"
    ]
    np.testing.assert_array_equal(predict(built.forward), predict(model()))
    first = built.spec.views(built.initial)["conv.lora_A.weight"]
    assert first.shape == (2, 2, 3, 3)
    assert 0.1 < np.abs(first).max() <= 18**-0.5
    vector = built.spec.flatten(moved(built))
    checks = check_gradients(built.model, built.spec, vector, batch_size=4)
    assert all(check.passed and check.compared for check in checks)
    assert len(checks) == 2 * len(LAYERS)


@pytest.mark.parametrize("opset", [13, 18])
def test_merged_weights_compute_what_adapters_did(opset):
    content = model(opset=opset)
    built = build(content, lora=LoRA(rank=2, alpha=6.0))
    arrays = moved(built)
    exported = export_model(built.forward, arrays)
    np.testing.assert_allclose(predict(exported), predict(filled(built.forward, arrays)), rtol=1e-4, atol=1e-4)
    assert np.abs(predict(exported) - predict(content)).max() > 0.1
    before, after = onnx.load_model_from_string(content), onnx.load_model_from_string(exported)
    assert [*after.graph.node] == [*before.graph.node]
    assert sorted(entry.name for entry in after.graph.initializer) == sorted(WEIGHTS)
    assert not after.metadata_props
    assert after.opset_import == before.opset_import


def test_a_quantized_layer_stays_so_beside_its_adapter():
    """Its gradients are those beside float weights of the same values."""
    names = ("conv.weight", "plain", "fc.weight")
    content, floats = quantized(model(), names)
    built = build(content, lora=2)
    exact = build(filled(model(), floats), lora=2)
    assert built.spec == exact.spec
    stored = {entry.name: entry for entry in onnx.load_model_from_string(built.model).graph.initializer}
    assert all(stored[f"{name}_quantized"].data_type == TensorProto.INT8 for name in names)
    assert not set(names).intersection(stored)
    feeds = {"x": X, "target": numbers((6, 4), 30)}
    found, expected = run(built, feeds), run(exact, feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)

    arrays = moved(built)
    exported = export_model(built.forward, arrays)
    np.testing.assert_allclose(predict(exported), predict(filled(built.forward, arrays)), rtol=1e-4, atol=1e-4)
    after = onnx.load_model_from_string(exported)
    left = {entry.name for entry in after.graph.initializer if ".lora_" in entry.name}
    assert left == {f"{layer}.lora_{part}.weight" for layer in ("conv", "plain", "fc") for part in "AB"}
    assert LORA in {entry.key for entry in after.metadata_props}


def test_train_adds_parameters_and_everything_else_is_frozen():
    built = build(model(), lora="2:fc,q", train=("last.*",))
    assert {parameter.name for parameter in built.spec.parameters} == {
        *[f"{layer}.lora_{part}.weight" for layer in ("fc", "q") for part in "AB"], "last.weight", "last.bias",
    }  # fmt: skip
    assert built.notes == ("trains LoRA adapters of rank 2 and alpha 16, 68 parameters, in 2 of 6 layers: q, fc",)
    assert not built.warnings


def test_a_rank_that_no_layer_needs_is_noted():
    (note,) = build(model(), lora="6:fc,q").notes
    assert note.endswith("; rank 5 would suffice for those with fewer inputs or outputs: q")


def test_a_weight_in_float16_is_merged_in_float32():
    text = "w = Cast<to=1>(fc.weight)\nturned = Transpose(w)\ny = MatMul(x, turned)"
    content = written(text, {"fc.weight": numbers((3, 4)).astype(np.float16)}, (4,))
    built = build(content, lora=2)
    x = numbers((5, 4), 1)
    arrays = moved(built)
    (before,) = session(filled(built.forward, arrays)).run(None, {"x": x})
    (after,) = session(export_model(built.forward, arrays)).run(None, {"x": x})
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


def test_layers_are_left_out_whose_weight_has_another_use():
    text = """
    ids = Cast<to=7>(x)
    e = Gather(table.weight, ids)
    k = MatMul(e, key.weight)
    turned = Transpose<perm=[1, 0]>(table.weight)
    y = MatMul(k, turned)
    """
    content = written(text, {"table.weight": numbers((5, 4)), "key.weight": numbers((4, 4))}, (3,))
    assert [*find_layers(onnx.load_model_from_string(content))] == ["key"]


def test_a_layer_that_is_used_twice_has_one_adapter():
    text = "a = MatMul(x, w)\nb = Tanh(a)\ny = MatMul(b, w)"
    content = forward(text, {"w": numbers((4, 4))}, (4,))
    built = build(content, lora=2)
    assert [parameter.name for parameter in built.spec.parameters] == ["w.lora_A.weight", "w.lora_B.weight"]
    arrays, x = moved(built), numbers((5, 4), 1)
    (before,) = session(filled(built.forward, arrays)).run(None, {"x": x})
    (after,) = session(export_model(built.forward, arrays)).run(None, {"x": x})
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"lora": 8}, {"lora": 8, "base": "int8"}, {"lora": "8:q,k", "base": "int4", "train": ("v",)}]
)
def test_a_hub_resumes_from_its_forward_model_with_the_same_graph(settings):
    text = "a = MatMul(x, q)\nb = Tanh(a)\nc = MatMul(b, k)\nd = Tanh(c)\ny = MatMul(d, v)"
    content = forward(text, {"q": numbers((8, 96)), "k": numbers((96, 96)), "v": numbers((96, 50))}, (8,))
    built = build(content, **settings)
    again = build(built.forward, **settings)
    assert again.model == built.model
    assert again.forward == built.forward
    np.testing.assert_array_equal(again.initial, built.initial)


def test_mistakes():
    with pytest.raises(
        GraphError, match=r"no layer matches the LoRA pattern 'k'; the layers are conv, point, q, "
    ):
        adapt(model(), LoRA(rank=2, targets="q, k"))
    for other in (LoRA(rank=3), LoRA(rank=2, alpha=8), LoRA(rank=2, targets="q")):
        with pytest.raises(GraphError, match=r"has other LoRA adapters already; .* merge them .* --model"):
            adapt(adapt(model(), LoRA(rank=2)).model, other)
    with pytest.raises(GraphError, match="the model has no layer that LoRA adapters fit"):
        adapt(forward("y = Mul(x, w)", {"w": numbers((3,))}, (3,)), LoRA(rank=2))
    for pattern, named in (("*", "conv, point, q, .*"), ("q", "q")):
        told = rf"{re.escape(pattern)}' matches only layers that have no adapter, .*: {named}; change"
        with pytest.raises(GraphError, match=told):
            adapt(model(), LoRA(rank=2, targets=pattern), ["*"])
    weights = {"fc.weight": numbers((3, 3)), "fc.lora_A.weight": numbers((3,))}
    content = written("a = MatMul(x, fc.weight)\ny = Add(a, fc.lora_A.weight)", weights, (3,))
    with pytest.raises(GraphError, match=r"has a tensor 'fc.lora_A.weight' already"):
        adapt(content, LoRA(rank=2))
    for wrong in ("q", "8:", "0", "5000"):
        with pytest.raises(ConfigError, match="is not a rank from 1 to 4096"):
            convert({"lora": wrong}, GraphSettings, where="test")
    table = {"rank": 8, "alpha": 32, "targets": "*.q_proj"}
    assert convert({"lora": table}, GraphSettings, where="test").lora == LoRA(rank=8, alpha=32, targets="*.q_proj")
