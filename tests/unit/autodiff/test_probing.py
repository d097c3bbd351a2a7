"""Tests of running a model in parts, which must compute the same with few tensors in memory."""

import weakref

import numpy as np
import onnx

from edgeasync.autodiff.graph import Array, Node, model_of, tensor, value_info
from edgeasync.autodiff.probing import PART_NODES, PartedModel, open_in_place, open_session
from edgeasync.autodiff.reading import OPSET_MIN
from edgeasync.autodiff.serialization import LARGE_BYTES_MIN, serialize

LAYERS = 4 * PART_NODES
WIDTH = int((LARGE_BYTES_MIN / 4) ** 0.5)


def _layers() -> list[Node]:
    """Return layers of which the last one also reads the first one's result."""
    nodes = [Node("MatMul", ["x", "w"], ["h0"])]
    nodes += [Node("Add", [f"h{number}", "b"], [f"h{number + 1}"]) for number in range(LAYERS)]
    return [*nodes, Node("Mul", [f"h{LAYERS}", "h0"], ["y"])]


def _weights_and_input() -> tuple[dict[str, Array], Array]:
    generator = np.random.default_rng(0)
    weights = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
    constants: dict[str, Array] = {
        name: generator.standard_normal(shape, np.float32) for name, shape in weights.items()
    }
    return constants, generator.standard_normal((3, WIDTH), np.float32)


def test_parts_compute_the_same_as_the_whole_model() -> None:
    constants, x = _weights_and_input()
    nodes = _layers()
    names = [node.outputs[0] for node in nodes]
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    tensors = [tensor(name, value) for name, value in constants.items()]
    whole = model_of(nodes, [value_info("x", x.dtype, x.shape)], outputs, tensors, opset=OPSET_MIN)
    expected = open_session(whole.SerializeToString()).run(names, {"x": x})
    model = PartedModel(nodes, constants, opset=OPSET_MIN)
    for _ in range(2):
        found = dict(model.run({"x": x}))
        assert list(found) == names
        for name, value in zip(names, expected, strict=True):
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-3, err_msg=name)
    assert dict(model.run({"x": x[:2]}))["y"].shape == (2, WIDTH)


def test_only_the_tensors_of_one_part_and_those_read_later_are_in_memory() -> None:
    model = PartedModel(
        _layers(), {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}, opset=OPSET_MIN
    )
    seen: list[weakref.ref[Array]] = []
    most = 0
    for _, value in model.run({"x": np.ones((2, 4), np.float32)}):
        seen.append(weakref.ref(value))
        most = max(most, sum(entry() is not None for entry in seen))
    assert len(seen) == LAYERS + 2
    assert most <= PART_NODES + 2


def test_weights_are_dequantized_when_a_layer_needs_them() -> None:
    layers = range(LAYERS)
    constants: dict[str, Array] = {f"q{layer}": np.full((4, 4), layer, np.int8) for layer in layers}
    constants["s"] = np.array(0.01, np.float32)
    nodes = [Node("DequantizeLinear", [f"q{layer}", "s"], [f"w{layer}"]) for layer in layers]
    nodes += [Node("MatMul", [f"h{layer}", f"w{layer}"], [f"h{layer + 1}"]) for layer in layers]
    model = PartedModel(nodes, constants, opset=OPSET_MIN)
    weights: list[weakref.ref[Array]] = []
    most = 0
    for name, value in model.run({"h0": np.ones((2, 4), np.float32)}):
        if name.startswith("w"):
            weights.append(weakref.ref(value))
        most = max(most, sum(entry() is not None for entry in weights))
    assert len(weights) == LAYERS
    assert most <= PART_NODES


def test_a_session_reads_large_constants_in_place() -> None:
    constants, x = _weights_and_input()
    nodes = [Node("MatMul", ["x", "w"], ["h"]), Node("Add", ["h", "b"], ["y"])]
    inputs, outputs = [value_info("x", x.dtype, x.shape)], [onnx.ValueInfoProto(name="y")]
    model = serialize(model_of(nodes, inputs, outputs, [], opset=OPSET_MIN), constants)
    session, values = open_in_place(model)
    assert values.keys() == {"w"}
    (y,) = session.run(["y"], {"x": x, **values})
    np.testing.assert_allclose(y, x @ constants["w"] + constants["b"], rtol=1e-4, atol=1e-3)
