"""Which of several outputs is trained."""

import re

import onnx
import pytest
from onnx import TensorProto, helper

from edgeasync.autodiff.build import build_training_graph
from edgeasync.autodiff.settings import GraphSettings
from tests.support.models.gradients import forward
from tests.support.models.small_models import dense, edited, refused

HEAD = "h = Gemm(x, w1, b1)\na = Relu(h)\nz = Gemm(a, w2, b2)\n"
INTS = {"l"}


def several(text, *outputs):
    def edit(proto):
        del proto.graph.output[:]
        for name in outputs:
            kind = TensorProto.INT64 if name in INTS else TensorProto.FLOAT
            proto.graph.output.append(helper.make_tensor_value_info(name, kind, ["batch", None]))

    return edited(forward(HEAD + text, dense(), (4,), output="z"), edit)


CHOSEN = {
    "scores and probabilities": ("y = Softmax<axis=1>(z)", ("y", "z"), "'y' is computed from scores"),
    "probabilities and a label": (
        "y = Softmax<axis=1>(z)\nl = ArgMax<axis=1>(z)", ("l", "y"), "comes from Softmax"),
    "probabilities and the largest": (
        "y = Softmax<axis=1>(z)\nm = ReduceMax<keepdims=0>(y)", ("m", "y"), "'m' is computed from scores"),
    "an embedding beside": ("e = Identity(a)", ("e", "z"), "layers compute it from 'e'"),
    "an embedding, scores and probabilities": (
        "y = Softmax<axis=1>(z)", ("a", "y", "z"), "'y' is computed .* and layers compute it from 'a'"),
    "the data beside": ("d = Neg(x)", ("d", "z"), "no other output depends on the data and on weights"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "outputs", "said"), CHOSEN.values(), ids=CHOSEN)
def test_the_scores_are_told_from_the_other_outputs(text, outputs, said):
    graph = build_training_graph(several(text, *outputs), GraphSettings())
    metadata = {entry.key: entry.value for entry in onnx.load_model_from_string(graph.model).metadata_props}
    assert metadata["edgeasync.output"] == "z"
    assert re.search(said, " ".join(graph.notes)), graph.notes


def test_several_heads_are_listed_with_their_shapes():
    text = "k = Tanh(h)\ns = Gemm(k, w2)"
    why = r"the model has 2 outputs \(s of shape \(batch, \?\), z of shape \(batch, \?\)\); choose .*: output='s'"
    refused(several(text, "s", "z"), why)
    build_training_graph(several(text, "s", "z"), GraphSettings(output="z"))


@pytest.mark.parametrize(
    "text", ["y = Mul(z, b2)", "k = Gemm(x, w1)\ny = Sub(z, k)"], ids=["scale", "other scores"]
)
def test_arithmetic_on_scores_may_be_meant_as_well(text):
    """It is no layer, such as the head of an embedding, and no ending, such as a softmax."""
    refused(several(text, "y", "z"), "the model has 2 outputs .*; choose the one to train: output='y'")
