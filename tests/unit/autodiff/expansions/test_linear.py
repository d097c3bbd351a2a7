"""Matrix products and convolutions that onnxruntime's optimizer fused: its values, and finite differences."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from edgeasync import nn
from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from edgeasync.training.graph_check import check_graph
from tests.support.models.gradients import check, forward, numbers, run
from tests.support.models.small_models import refused

SHAPES = {
    "matrices": ("transA=0", (3, 4), (4, 5)),
    "transposed": ("transA=1, transB=1", (4, 3), (5, 4)),
    "scaled": ("alpha=0.5, transB=1", (3, 4), (5, 4)),
    "batches": ("transB=1", (2, 3, 4), (2, 5, 4)),
    "a first axis that moves": ("transBatchB=1", (2, 3, 4), (4, 1, 2, 5)),
    "the other's first axis": ("transBatchA=1", (2, 3, 4), (2, 3, 4, 5)),
    "a first axis that moves, and a swap": ("transBatchB=1, transB=1", (2, 3, 4), (5, 1, 2, 4)),
}


@pytest.mark.parametrize(("attributes", "x", "w"), SHAPES.values(), ids=SHAPES)
def test_a_product(attributes, x, w):
    def formula(x, parameters):
        h, w = x * parameters["p"], parameters["w"]
        h = np.moveaxis(h, 0, -2) if "transBatchA" in attributes else h
        w = np.moveaxis(w, 0, -2) if "transBatchB" in attributes else w
        h = h.swapaxes(-1, -2) if "transA=1" in attributes else h
        w = w.swapaxes(-1, -2) if "transB=" in attributes else w
        return h @ w * (0.5 if "alpha" in attributes else 1)

    check(f"y = com.microsoft.FusedMatMul<{attributes}>(h, w)", x, {"w": numbers(w, 5)}, reference=formula)


ACTIVATIONS = {
    "": ("", "", lambda x: x),
    "Relu": ("", "", lambda x: np.maximum(x, 0)),
    "Tanh": ("", "", np.tanh),
    "Sigmoid": ("", "", lambda x: 1 / (1 + np.exp(-x))),
    "LeakyRelu": ("[0.25]", ", activation_alpha=0.25", lambda x: np.where(x > 0, x, 0.25 * x)),
    "HardSigmoid": ("[0.25, 0.5]", ", activation_alpha=0.25, activation_beta=0.5",
                    lambda x: np.clip(0.25 * x + 0.5, 0, 1)),
    "Clip": ("[-0.5, 1.5]", None, lambda x: np.clip(x, -0.5, 1.5)),
}  # fmt: skip


@pytest.mark.parametrize(
    "activation", [name for name, (_, given, _) in ACTIVATIONS.items() if name and given is not None]
)
def test_a_gemm_with_an_activation(activation):
    _, parameters, function = ACTIVATIONS[activation]
    attributes = f'activation="{activation}", transB=1, alpha=0.5, beta=2.0{parameters}'
    text = f"y = com.microsoft.FusedGemm<{attributes}>(h, w, b)"
    check(text, (4,), {"w": numbers((5, 4), 5), "b": numbers((5,), 6)}, reference=lambda x, parameters: function(
        0.5 * (x * parameters["p"]) @ parameters["w"].T + 2 * parameters["b"]))  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("added", [False, True])
def test_a_convolution_with_an_activation(activation, added):
    given, _, function = ACTIVATIONS[activation]

    def formula(x, parameters):
        h, w = x * parameters["p"], parameters["w"]
        wide = np.pad(h, ((0, 0), (0, 0), (1, 1)))
        y = sum(np.einsum("ncl,oc->nol", wide[:, :, place : place + 5], w[:, :, place]) for place in range(3))
        return function(y + parameters["b"][:, None] + (parameters["z"] if added else 0))

    attributes = [f'activation="{activation}"'] if activation else []
    attributes += [f"activation_params={given}"] if given else []
    parameters = {"w": numbers((3, 2, 3), 5), "b": numbers((3,), 6)}
    more = ""
    if added:
        # The kernel needs a tensor of the output's shape.
        parameters, more = parameters | {"z": numbers((1, 3, 5), 7)}, ", wide"
    text = f"y = com.microsoft.FusedConv<{', '.join([*attributes, 'pads=[1, 1]'])}>(h, w, b{more})"
    if added:
        sizes = "n = Shape<start=0, end=1>(x)\nlast = Shape<start=1>(z)\ns = Concat<axis=0>(n, last)"
        text = f"{sizes}\nwide = Expand(z, s)\n{text}"
    check(text, (2, 5), parameters, reference=formula)


def test_an_unknown_activation():
    text = 'h = Mul(x, p)\ny = com.microsoft.FusedGemm<activation="Softplus">(h, w)'
    model = forward(text, {"p": numbers((1, 4)), "w": numbers((4, 3), 1)}, (4,))
    refused(model, "its activation is Softplus with 0 parameters; use the original file, before onnxruntime opt")


def test_a_file_that_onnxruntime_has_optimized(tmp_path):
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 5), nn.LeakyReLU(0.2)]
    layers += [nn.Linear(5, 5), nn.Sigmoid(), nn.Linear(5, 3)]
    proto = nn.to_onnx(nn.Sequential(*layers), (1, 8, 8))
    for place, entry in enumerate(proto.graph.initializer):
        if entry.data_type == onnx.TensorProto.FLOAT:  # onnxruntime merges tensors of the same values
            entry.CopyFrom(numpy_helper.from_array(numbers(tuple(entry.dims), place), entry.name))
    data = proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
    optimized = (tmp_path / "optimized.onnx").read_bytes()
    own = {node.op_type for node in onnx.load_model_from_string(optimized).graph.node if node.domain}
    assert own == {"FusedConv", "FusedGemm"}
    x, labels = numbers((4, 1, 8, 8)), np.array([0, 2, 1, 1])
    name = proto.graph.input[0].name
    results = []
    for content in (data, optimized):
        graph = build_training_graph(content, GraphSettings(loss="cross_entropy"))
        check_graph(graph.model, bytes_max=1 << 20)
        results.append(run(graph, {name: x, "target": labels}))
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        np.testing.assert_allclose(results[1][key], value, rtol=1e-4, atol=1e-7, err_msg=key)
